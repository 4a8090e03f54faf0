"""What is known of a model before it is loaded: the headers of its files, its config and its class."""
