"""Inspection of a load: `plan` before it, `report` after it, and `diff` of the code."""
