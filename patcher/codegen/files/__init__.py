"""Configs and generated files on disk."""
