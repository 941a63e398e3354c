"""Guards for the loops of other frameworks. Each module needs its framework installed."""
