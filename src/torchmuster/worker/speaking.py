"""Words that one rank says for all."""

from torchmuster.train.metrics.progress import Lines
from torchmuster.train.world import World


def say(world: World, text: str) -> None:
    """Print a text, on rank 0."""
    if world.is_first:
        Lines().say(text)
