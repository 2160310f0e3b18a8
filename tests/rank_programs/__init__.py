"""What ranks do in tests of ``train/``; see ``rank_group.py``."""
