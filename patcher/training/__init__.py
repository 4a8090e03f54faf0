"""Training a patched model: which parameters fusions have joined, and the state of optimizers in either layout."""
