"""LoRA trainings from settings: what they leave, and what loads it again."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tiny_models
from rank_programs.trained_models import IDS, _Asked
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import MusterError
from torchmuster.train.models import lora
from torchmuster.train.world import World, rank_zero_first
from torchmuster.worker import model, training

Settings = Mapping[str, str]
# A training, or the next part of one, in a folder of this name.
Part = tuple[str, Settings]
FORMER = (
    "former"  # a setting: save the frozen weights too, as versions before checkpoints had a base
)


def train(
    world: World, folder: str, parts: Sequence[Part], adapters: Mapping[str, bool]
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train each part; return its losses and logits, or the refusal. Then load adapters."""
    os.chdir(folder)
    with rank_zero_first(world):
        if not Path("qwen").exists():
            _make_models()
    return [_train(world, name, settings) for name, settings in parts], _load(adapters)


def _make_models() -> None:
    """Make a model, the same in another folder, and one with another weight."""
    from safetensors.torch import load_file, save_file

    Path("a.txt").write_text("\n".join(tiny_models.LINES))
    tiny_models.make_model(Path("qwen"), "byte-level", tie_word_embeddings=False)
    for name in ("moved", "other"):
        shutil.copytree("qwen", name)
    tensors = load_file("other/model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, "other/model.safetensors", metadata={"format": "pt"})


def _train(world: World, name: str, settings: Settings) -> dict[str, Any]:
    flags = [
        Flag(flag="--set", path=path, text=text)
        for path, text in settings.items()
        if path != FORMER
    ]
    folder, asked = Path(name), _Asked()
    folder.mkdir(exist_ok=True)
    base_of = (lambda *arguments: None) if FORMER in settings else model.base_of
    try:
        with mock.patch.multiple(training, Trainer=asked, base_of=base_of):
            training.train_from_settings(resolve_settings(flags=flags).settings, world, folder)
    except MusterError as error:
        return {"what": error.what, "why": error.why, "fix": error.fix}
    dist.barrier()  # rank 0 writes the files that all read
    lines = (folder / "metrics" / "steps.jsonl").read_text().splitlines()
    return {
        "losses": [json.loads(line)["loss"] for line in lines],
        "logits": asked.logits,
        "final": (folder / "checkpoints" / "final" / "adapter_model.safetensors").read_bytes(),
    }


def _load(folders: Mapping[str, bool]) -> dict[str, torch.Tensor]:
    """Load adapters as their user does, in 4 bits where that is said; return the logits of each."""
    import peft
    from transformers import BitsAndBytesConfig

    answers = {}
    for folder, in_4_bits in folders.items():
        options: dict[str, Any] = {}
        if in_4_bits:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            )
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, **options
        )
        # bitsandbytes 0.50.2 fails on CPUs with AVX512-BF16 to repack layers narrower than a block of 64.
        lora.keep_training_kernels(loaded)
        with torch.no_grad():
            answers[folder] = loaded.eval()(input_ids=IDS).logits
    return answers
