"""What stands at the places of transformers, torch and accelerate that call back: one file a subject."""
