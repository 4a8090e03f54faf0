"""Weight transforms: selected, traced while they run, simulated by names and shapes, and reversed."""
