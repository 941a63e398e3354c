"""Training scripts that know nothing of nanguard, to be measured under it."""
