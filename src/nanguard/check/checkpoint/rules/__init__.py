"""Rules that read checkpoints."""
