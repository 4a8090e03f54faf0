"""Adapters of peft on fused models: of the layers that transformers has onto those that are there, and back."""
