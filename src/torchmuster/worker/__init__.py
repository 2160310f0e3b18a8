"""The program of each rank for training from settings: ``python -m torchmuster.worker``."""
