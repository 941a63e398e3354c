"""Reports: what was found, in words. They show and never decide."""
