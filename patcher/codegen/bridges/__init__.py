"""Conversion between a config, which describes a file, and a `Patcher`, which has the same effect at run time."""
