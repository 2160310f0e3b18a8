"""The classic training classes and functions, over the same parts as everything else here."""
