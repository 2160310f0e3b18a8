"""The LoRA example's own function on ranks that can be asked about weights."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import torch

from torchmuster.train.world import World

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def what_changes(world: World) -> tuple[bool, bool]:
    """Fine-tune a little; say whether all weights of the model are as before, and any adapter is not."""
    with mock.patch("sys.path", [str(EXAMPLES), *sys.path]):
        example = runpy.run_path(str(EXAMPLES / "fine_tune_with_lora.py"))
        torch.manual_seed(0)
        base = example["LittleGpt"](length=example["LENGTH"])
        before = {name: one.detach().clone() for name, one in base.named_parameters()}
        model = example["fine_tune"](world, base)
    after = {name: one.detach() for name, one in model.named_parameters()}
    originals = [(name, one) for name, one in after.items() if ".lora_" not in name]
    unchanged = len(originals) == len(before) and all(
        torch.equal(one, before[name.removeprefix("base_model.model.").replace(".base_layer", "")])
        for name, one in originals
    )
    # peft begins with zeros in the second matrix of each pair: what is not zero was trained.
    changed = all(bool(one.any()) for name, one in after.items() if ".lora_B" in name)
    return unchanged, changed
