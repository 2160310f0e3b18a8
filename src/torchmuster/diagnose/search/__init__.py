"""Find the few bad hosts and links of a large group in O(log N) rounds.

This package imports nothing: import the module that you need.
"""
