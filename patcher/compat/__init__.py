"""What is private to transformers: every name of it that this package touches, and nothing else."""
