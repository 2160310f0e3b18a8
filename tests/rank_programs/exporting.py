"""A training that is saved, and the weights as save_weights writes them."""

from pathlib import Path

from rank_programs.saving import Training
from torchmuster.train.checkpointing.checkpointer import Checkpointer
from torchmuster.train.weights import save_weights
from torchmuster.train.world import World


def save_both_ways(world: World, folder: Path) -> str:
    """Leave a checkpoint in ``folder/c`` and the same weights in ``folder/whole``; return its name."""
    training = Training(world, "fsdp")
    training.train(2)
    with Checkpointer(folder / "c") as saver:
        training.save(saver)
        report = saver.wait()
    save_weights(training.model, training.strategy, folder / "whole", world)
    assert report is not None
    assert report.problem is None
    return report.name
