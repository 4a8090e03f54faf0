"""Functions of modeling code replaced for one model: what is called, and classes whose functions see other globals."""
