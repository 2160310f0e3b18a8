"""What each launched process runs to train from settings: ``python -m torchmuster.worker``."""
