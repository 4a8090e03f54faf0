"""What other libraries do with a patched model, beside what they do with the stock one: a table that tests hold."""
