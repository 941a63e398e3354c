"""What measures nanguard's speed and accuracy."""
