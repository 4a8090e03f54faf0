"""Training a patched model: the parts of fused parameters, and optimizer state in either layout."""
