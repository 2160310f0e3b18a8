"""Training on GPUs: exactness, precisions, waits of the host, resume, adapters."""

import json
from pathlib import Path

import pytest

from gpu.conftest import Muster

CONFIG = """\
model: {build: "gpu_model:make_model", loss: language_model}
data: {dataset: "gpu_model:make_rows"}
train: {steps: 8, global_batch_size: 8, log_every: 1, precision: fp32, learning_rate: 1e-4}
"""

# With this mode, an operation that waits for the GPU is an error. It is on from the 3rd to the 10th update.
WITHOUT_WAITS = """\
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from gpu_model import make_model, make_rows
from torchmuster import BatchLoader, Trainer, join_world, language_model

updates = 0

def watch(*_):
    global updates
    updates += 1
    if updates == 3:
        torch.cuda.set_sync_debug_mode("error")
    if updates == 10:
        torch.cuda.set_sync_debug_mode("default")

with join_world() as world:
    trainer = Trainer(
        world=world,
        model=make_model,
        loss=language_model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=BatchLoader(make_rows(), world, global_batch_size=8),
    )
    register_optimizer_step_post_hook(watch)
    trainer.fit(steps=12)
    assert updates == 12
"""


def train(muster: Muster, folder: str, *words: str, ranks: int = 1) -> list[float]:
    """Train, and return the loss of each step."""
    Path(folder).mkdir()
    config = Path(folder) / "config.yaml"
    config.write_text(CONFIG)
    gpus = ("--num-gpus", str(ranks))
    muster("train", "--config", str(config), *gpus, "--runs", f"{folder}/runs", *words)
    (steps,) = Path(folder).glob("runs/*/metrics/steps.jsonl")
    return [json.loads(line)["loss"] for line in steps.read_text().splitlines()]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_train_like_one(muster: Muster, strategy: str) -> None:
    alone = train(muster, "alone")
    together = train(muster, "together", "--set", f"distributed.strategy={strategy}", ranks=2)
    assert together == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_near_fp32(muster: Muster, precision: str) -> None:
    exact = train(muster, "fp32", "--set", "train.steps=30")
    mixed = train(
        muster, precision, "--set", "train.steps=30", "--set", f"train.precision={precision}"
    )
    # fp16 may skip its first steps, until its loss scale is small enough.
    assert mixed[-1] == pytest.approx(exact[-1], rel=0.05)


def test_no_step_waits_for_the_gpu(muster: Muster) -> None:
    Path("train.py").write_text(WITHOUT_WAITS)
    muster("run", "--num-gpus", "1", "train.py")


def test_compiled_blocks_give_the_same_losses(muster: Muster) -> None:
    eager = train(muster, "eager")
    compiled = train(muster, "compiled", "--set", "train.compile=true")
    assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_and_resumed_training_is_the_same_bit_by_bit(
    muster: Muster, strategy: str
) -> None:
    settings = f"distributed: {{strategy: {strategy}}}\ncheckpoint: {{every: 3}}\n"
    Path("config.yaml").write_text(CONFIG.replace("steps: 8", "steps: 12") + settings)
    stops = ("--only", "resume.rank-killed", "--steps", "12")
    proof = json.loads(
        muster("prove", *stops, "--ranks", "2", "--device", "gpu", "--json", "config.yaml")
    )
    assert proof["passed"]
    assert [result["difference"] for result in proof["results"]] == [None]


@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_learn(muster: Muster, quantized: bool) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    if quantized:
        pytest.importorskip("bitsandbytes")
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=512, num_attention_heads=4, **size)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    model = "model: {model_name_or_path: llama, loss: language_model, lora: {r: 8}}"
    text = CONFIG.replace(CONFIG.splitlines()[0], model).replace("steps: 8", "steps: 30")
    Path("config.yaml").write_text(text)
    four_bit = ("--set", f"model.load_in_4bit={str(quantized).lower()}")
    rate = ("--set", "train.learning_rate=0.01")
    muster("train", "--config", "config.yaml", "--num-gpus", "1", *four_bit, *rate)
    (steps,) = Path("runs").glob("*/metrics/steps.jsonl")
    losses = [json.loads(line)["loss"] for line in steps.read_text().splitlines()]
    assert losses[-1] < losses[0]
