"""Training: parts that each work alone in a hand-written loop, and ``Trainer``, which puts them in order.

Import from the modules; the README of this folder says which one has what.
"""
