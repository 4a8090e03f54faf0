"""One load as five steps, and what it leaves on the model: the record, by which it is saved and reported on."""
