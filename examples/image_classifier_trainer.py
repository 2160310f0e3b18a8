"""Train an image classifier with Trainer.

    python image_classifier_trainer.py
    torchrun --standalone --nproc-per-node 2 image_classifier_trainer.py
    muster run --device cpu --ranks 2 image_classifier_trainer.py

These are the parts of image_classifier_own_loop.py, put in order by Trainer.
"""

import argparse
from functools import partial

import torch
from image_classifier_own_loop import measure
from shapes import draw, network

from torchmuster import (
    BatchLoader,
    Evaluation,
    Trainer,
    World,
    cross_entropy,
    evaluate,
    join_world,
    schedule,
)


def train(world: World, epochs: int) -> None:
    """Train on all ranks together."""
    loader = BatchLoader(draw(2048, seed=1), world, global_batch_size=64)
    held_out = BatchLoader(draw(1000, seed=2), world, global_batch_size=200, shuffle=False)
    torch.manual_seed(0)
    trainer = Trainer(
        world=world,
        model=network(),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=loader,
        clip_norm=1.0,
        schedule=partial(schedule, shape="cosine", total_steps=epochs * loader.steps_in_epoch()),
        evaluation=Evaluation(loader=held_out, measure=measure),
    )
    trainer.fit(epochs=epochs)
    found = evaluate(trainer.model, held_out, measure, world, trainer.precision.value)
    if world.is_first:
        print(f"in the end: accuracy {found['accuracy']:.1%}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with join_world() as world:
        train(world, options.epochs)
