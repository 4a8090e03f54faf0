"""A Patcher, a model class and a config, to what happens: a value that the load, plan and report all use."""
