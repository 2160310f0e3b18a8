"""Plan a training run: whether it fits, how to split it, and how fast it will be."""
