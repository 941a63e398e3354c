"""Training code as rules read it."""
