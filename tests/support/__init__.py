"""What tests share. Nothing here imports a test, and no test imports another: see `tests/project/test_imports.py`."""
