"""One folder per lab: reading, solution (source of the starter), checks, texts."""
