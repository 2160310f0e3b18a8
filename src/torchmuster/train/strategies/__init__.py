"""Strategies that distribute a model over the ranks: one file each, one protocol for all."""
