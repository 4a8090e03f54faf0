"""Rendering of `Report`, `Plan`, `Verification` and `Diff`.

They consist of parts (`parts`, `tree`), which `terminal` and `page` render.
"""
