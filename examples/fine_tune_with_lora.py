"""Fine-tune a language model with LoRA: small matrices are trained beside weights that stay as they are.

    python fine_tune_with_lora.py
    torchrun --standalone --nproc-per-node 2 fine_tune_with_lora.py --out adapters
    muster run --device cpu --ranks 2 fine_tune_with_lora.py

A small GPT first learns to write Python, as it is in this folder. Then its weights are frozen, and adapters teach it
PYTHON IN CAPITAL LETTERS, which it has never seen. For a model of the Hugging Face hub no script is
needed: `muster train` with model.lora. Needs peft: pip install 'torchmuster[lora]'.
"""

import argparse
from pathlib import Path

import torch
from little_gpt import LittleGpt, measure, next_byte_loss, pieces_of_text
from torch import nn

from torchmuster import (
    BatchLoader,
    Reports,
    Trainer,
    World,
    add_lora,
    evaluate,
    join_world,
    save_adapters,
)

LENGTH = 64
# Of each block: what makes queries, keys and values, and the two layers of the network after it.
BESIDE = ["queries_keys_values", "feed_forward.1", "feed_forward.3"]


def in_capitals(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the texts with capital letters for small ones."""
    return [piece - 32 * ((piece >= ord("a")) & (piece <= ord("z"))).long() for piece in pieces]


def fit(world: World, model: nn.Module, pieces: list[torch.Tensor], *, rate: float) -> None:
    """Train those weights of a model that are not frozen, for one epoch."""
    trainer = Trainer(
        world=world,
        model=model,
        loss=next_byte_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        data=BatchLoader(pieces, world, global_batch_size=32),
        strategy="auto",
        clip_norm=1.0,
        reports=Reports(world, quiet=True),
    )
    trainer.fit(epochs=1)


def fine_tune(world: World, base: nn.Module) -> nn.Module:
    """Put adapters beside a model's layers, train them on capital letters, and say what that gave."""
    pieces, held_out = (in_capitals(one) for one in pieces_of_text(LENGTH))
    test_loader = BatchLoader(held_out, world, global_batch_size=16, shuffle=False)
    model = add_lora(base, r=8, target_modules=BESIDE)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    of_all = sum(one.numel() for one in model.parameters())
    before = evaluate(model, test_loader, measure, world)
    fit(world, model, pieces, rate=1e-2)
    after = evaluate(model, test_loader, measure, world)
    if world.is_first:
        print(f"trained {trained:,} of {of_all:,} weights", flush=True)
        print(f"loss {before['loss']:.4f} before, loss {after['loss']:.4f} after", flush=True)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a folder for the adapters, as peft reads them")
    options = parser.parse_args()
    with join_world() as world:
        torch.manual_seed(0)
        base = LittleGpt(length=LENGTH).to(world.device)
        fit(world, base, pieces_of_text(LENGTH)[0], rate=3e-3)
        model = fine_tune(world, base)
        if options.out is not None:
            save_adapters(model, model.state_dict(), options.out, world)
