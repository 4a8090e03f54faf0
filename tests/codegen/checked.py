"""A modeling module and a config of it, as the texts of their files."""

from __future__ import annotations

SOURCE = """
def g(x):
    return f(x)


def f(x):
    return x
"""
CONFIG = """
from patcher.codegen import PatchConfig

config = PatchConfig("modeling_checked", "patched_modeling_checked.py")


@config.replace_function("f", description="more")
def f(x):
    return x + 1
"""
