"""What a load would do, what it did, and what it changes in the code."""
