"""From a config to the text of a file. Nothing here imports what it reads, nor torch, nor transformers."""
