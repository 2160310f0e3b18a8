"""Train an image classifier with a loop of your own, out of single parts.

    python image_classifier_own_loop.py
    torchrun --standalone --nproc-per-node 2 image_classifier_own_loop.py
    muster run --device cpu --ranks 2 image_classifier_own_loop.py

It gives the same numbers on any number of ranks, and the same as image_classifier_trainer.py.
"""

import argparse

import torch
from shapes import draw, network
from torch import nn
from torch.nn.functional import cross_entropy

from torchmuster import (
    BatchLoader,
    TrainStep,
    World,
    choose_precision,
    evaluate,
    join_world,
    rank_zero_first,
    schedule,
)
from torchmuster.train.strategies.ddp import Ddp

Batch = tuple[torch.Tensor, torch.Tensor]


def measure(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Say for each picture whether it was told right, and how wrong it was."""
    pictures, kinds = batch
    scores = model(pictures)
    return {
        "accuracy": scores.argmax(1) == kinds,
        "loss": cross_entropy(scores.float(), kinds, reduction="none"),
    }


def train(world: World, epochs: int) -> None:
    """Train on all ranks together."""
    with rank_zero_first(
        world
    ):  # rank 0 before the others: where something would be downloaded, once
        pictures, held_out = draw(2048, seed=1), draw(1000, seed=2)
    loader = BatchLoader(pictures, world, global_batch_size=64)
    test_loader = BatchLoader(held_out, world, global_batch_size=200, shuffle=False)

    torch.manual_seed(0)
    strategy = Ddp(world)
    model = strategy.prepare(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = choose_precision("auto", world).value
    update = TrainStep(
        model,
        optimizer,
        strategy,
        world,
        precision=precision,
        clip_norm=1.0,
        schedule=schedule(optimizer, "cosine", total_steps=epochs * loader.steps_in_epoch()),
    )
    for epoch in range(epochs):
        model.train()
        for step in loader.epoch(epoch):
            for micro in update.accumulate(step):
                inputs, kinds = micro.batch
                with precision.autocast(world.device):
                    loss = cross_entropy(model(inputs), kinds)
                update.backward(loss)
            update.apply()
        found = evaluate(model, test_loader, measure, world, precision)
        if world.is_first:
            print(f"epoch {epoch}: accuracy {found['accuracy']:.1%}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with join_world() as world:
        train(world, options.epochs)
