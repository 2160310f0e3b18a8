"""Memory that a training run needs on a device and on its host."""
