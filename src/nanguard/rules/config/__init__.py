"""Rules that read configurations."""
