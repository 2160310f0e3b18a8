"""Cells of a notebook on ranks: ``%load_ext torchmuster``, ``%muster start``, ``%%ranks``."""
