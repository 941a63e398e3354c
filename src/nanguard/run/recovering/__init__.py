"""Automatic recovery of a whole job: ``nanguard run --recover``."""
