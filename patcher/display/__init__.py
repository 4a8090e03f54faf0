"""How the values that tell what happened are shown: `Report`, `Plan`, `Verification`, `Diff`.

Each says of what parts it is made (`parts`, `tree`); a terminal and a page show the same parts.
"""
