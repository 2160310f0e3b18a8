"""One folder for each lab: reading, solution (the starter is cut from it), checks, measurements, words."""
