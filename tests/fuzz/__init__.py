"""Generated forwards, each fused where the proof accepts it and compared with what it was: see `__main__.py`."""
