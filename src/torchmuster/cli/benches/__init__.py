"""One module for each bench of ``muster bench``, imported on use."""
