"""Rules that read training code."""
