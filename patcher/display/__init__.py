"""How the values that describe what happened are shown: `Report`, `Plan`, `Verification`, `Diff`.

Each consists of parts (`parts`, `tree`); a terminal and a page show the same parts.
"""
