"""Which projections of a forward provably receive the same input: read from its source, or refused with the line."""
