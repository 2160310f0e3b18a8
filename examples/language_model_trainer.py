"""Train a small language model with Trainer.

    python language_model_trainer.py
    torchrun --standalone --nproc-per-node 2 language_model_trainer.py
    muster run --device cpu --ranks 2 language_model_trainer.py

These are the parts of language_model_own_loop.py, put in order by Trainer.
"""

import argparse

import torch
from little_gpt import LittleGpt, measure, next_byte_loss, pieces_of_text

from torchmuster import BatchLoader, Trainer, World, evaluate, join_world

LENGTH = 64


def train(world: World, epochs: int) -> None:
    """Train on all ranks together."""
    pieces, held_out = pieces_of_text(LENGTH)
    loader = BatchLoader(pieces, world, global_batch_size=32, micro_batch_size=8)
    test_loader = BatchLoader(held_out, world, global_batch_size=16, shuffle=False)
    torch.manual_seed(0)
    trainer = Trainer(
        world=world,
        model=LittleGpt(length=LENGTH),
        loss=next_byte_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=loader,
        clip_norm=1.0,
    )
    trainer.fit(epochs=epochs)
    found = evaluate(trainer.model, test_loader, measure, world, trainer.precision.value)
    if world.is_first:
        print(f"in the end: loss {found['loss']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with join_world() as world:
        train(world, options.epochs)
