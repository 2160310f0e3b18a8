"""Checkpoints as they lie in a folder or in object storage: written, verified, kept, exported.

Import from the modules; the README of this folder says which one has what.
"""
