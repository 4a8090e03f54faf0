"""The identity law of generated files, on real modeling files: `python -m tests.identity`."""
