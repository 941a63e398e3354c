"""Rules that read logs."""
