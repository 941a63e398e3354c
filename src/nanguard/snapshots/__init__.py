"""The last good state of a run: in memory, on disk, and how to get back to it."""
