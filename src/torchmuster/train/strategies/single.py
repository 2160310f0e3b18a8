"""Strategy for one process and one device: nothing is distributed."""

from torchmuster.train.strategies.strategy import Strategy


class Single(Strategy):
    """Moves the model to the rank's device, and nothing else."""

    name = "single"
