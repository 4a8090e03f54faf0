"""Resolves a Patcher, a model class and a config to the changes that loads, `plan` and `report` use."""
