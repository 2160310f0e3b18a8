"""Save the training state as checkpoints without pickle, and load it on any number of ranks."""
