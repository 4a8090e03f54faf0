"""Every fusion on every architecture of transformers: `python -m tests.coverage`."""
