"""The hooks in transformers, torch and accelerate: one file a subject."""
