"""Between a config, which describes a file, and a `Patcher`, which does the same at run time."""
