"""One module for each benchmark of ``muster bench``, imported on use."""
