"""The value: what to change in a model. Normalised, validated, combined, compared and written as data."""
