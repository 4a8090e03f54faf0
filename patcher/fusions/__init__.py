"""Fusions: other layouts of the same computation, decided module by module while a model loads."""

from patcher.conversions.layouts import Flatten, Layout, Rows
from patcher.fusions.base import Fusion

__all__ = ["Flatten", "Fusion", "Layout", "Rows"]
