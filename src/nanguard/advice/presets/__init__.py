"""Stable configurations to begin with, each value with its reason and when to change it."""
