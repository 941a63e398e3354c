"""What measures nanguard."""
