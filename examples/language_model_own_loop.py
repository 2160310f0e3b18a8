"""Train a small language model with a loop of your own, out of single parts; sharded with --strategy fsdp.

    python language_model_own_loop.py
    torchrun --standalone --nproc-per-node 2 language_model_own_loop.py --strategy fsdp
    muster run --device cpu --ranks 2 language_model_own_loop.py

It gives the same numbers on any number of ranks, and the same as language_model_trainer.py.
"""

import argparse
from typing import Literal

import torch
from little_gpt import LittleGpt, measure, next_byte_loss, pieces_of_text

from torchmuster import (
    BatchLoader,
    TrainStep,
    World,
    build_strategy,
    choose_precision,
    evaluate,
    join_world,
)

LENGTH = 64


def train(world: World, epochs: int, strategy_name: Literal["ddp", "fsdp"]) -> None:
    """Train on all ranks together."""
    pieces, held_out = pieces_of_text(LENGTH)
    # Each rank computes 8 pieces at a time, and as often as it takes to make 32 in a step.
    loader = BatchLoader(pieces, world, global_batch_size=32, micro_batch_size=8)
    test_loader = BatchLoader(held_out, world, global_batch_size=16, shuffle=False)
    torch.manual_seed(0)
    precision = choose_precision("auto", world).value
    strategy = build_strategy(strategy_name, world, precision=precision)
    model = strategy.prepare(LittleGpt(length=LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    update = TrainStep(model, optimizer, strategy, world, precision=precision, clip_norm=1.0)
    for epoch in range(epochs):
        for step in loader.epoch(epoch):
            for micro in update.accumulate(step):
                with precision.autocast(world.device):
                    total, count = next_byte_loss(model, micro.batch)
                update.backward(total, count)
            update.apply()
        found = evaluate(model, test_loader, measure, world, precision)
        if world.is_first:
            print(f"epoch {epoch}: loss {found['loss']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    options = parser.parse_args()
    with join_world() as world:
        train(world, options.epochs, options.strategy)
