"""Data sets as rules read them."""
