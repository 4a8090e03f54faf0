"""Stacked weights of experts as linear layers of each: how forwards use stacks, and what stands in their place."""
