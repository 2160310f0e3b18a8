"""Saving a training's state as checkpoints without pickle, and reading it back on any number of ranks."""
