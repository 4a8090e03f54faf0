"""Loads of all kinds in threads and processes, with faults at every stage: what they leave behind."""
