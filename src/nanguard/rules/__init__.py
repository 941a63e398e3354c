"""Judgements about sources: one rule, one file, in the folder of what it reads."""
