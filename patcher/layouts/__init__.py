"""Layouts of parameters, and weight conversions as layouts: selected, run, and reversed exactly."""
