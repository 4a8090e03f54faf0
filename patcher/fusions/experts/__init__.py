"""Experts as linear layers: the layout of their stacks, their forward, and which classes get which."""
