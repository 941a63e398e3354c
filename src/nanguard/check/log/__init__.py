"""Logs of runs as rules read them."""
