"""Generation of a file from a config. Neither the read modules nor torch nor transformers are imported here."""
