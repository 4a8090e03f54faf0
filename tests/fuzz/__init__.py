"""Generated forwards, each fused where it is accepted and compared with what it was: see `__main__.py`."""
