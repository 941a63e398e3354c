"""Showing runs and what happened in them."""
