"""``nanguard run``: any training command, unmodified, under the guard."""
