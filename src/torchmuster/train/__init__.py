"""Training: parts that each work in a hand-written loop, and ``Trainer``, which combines them.

Import from the modules; the README of this folder lists their contents.
"""
