"""Whether a patched model computes, learns and saves what the stock model does."""
