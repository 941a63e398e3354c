"""Finds out why a step went bad, by trying what would have kept it from doing so."""
