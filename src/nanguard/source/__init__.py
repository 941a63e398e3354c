"""Reading and editing the text of files: for checks, and for fixes before and after a run."""
