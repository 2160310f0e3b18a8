"""What a training takes of a device and of its host."""
