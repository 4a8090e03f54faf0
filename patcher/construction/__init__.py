"""The patchers in force, and the construction of models under them."""
