"""Checkpoints as rules read them; nothing in one is ever run."""
