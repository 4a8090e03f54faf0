"""Building modules as others: what is in force, one construction, and how the classes of modeling code are reached."""
