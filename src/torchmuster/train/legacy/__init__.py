"""The legacy training API, built on the same parts as ``Trainer``."""
