"""Data whose samples have no number to ask for: files, object storage, iterables; read in lanes."""
