"""Rules that read data."""
