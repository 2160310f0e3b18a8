"""The checks of ``muster selftest``, by subject."""
