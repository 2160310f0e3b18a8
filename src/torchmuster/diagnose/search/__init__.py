"""Finding the few bad machines and links of a large group in a number of rounds that grows as log N.

Nothing is imported here: import the module that has what you need.
"""
