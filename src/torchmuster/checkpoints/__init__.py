"""Write, verify, prune and export checkpoints in a folder or in object storage.

Import from the modules; the README of this folder lists their contents.
"""
