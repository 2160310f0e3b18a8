"""The measuring programs. They run in separate processes, since they import torch."""
