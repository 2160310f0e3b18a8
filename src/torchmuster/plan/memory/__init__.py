"""Memory that a training needs on a device and on its host."""
