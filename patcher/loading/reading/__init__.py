"""The fourth step of a load: names and shapes are checked, the weights are read, what was read is checked."""
