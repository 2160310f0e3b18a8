"""Compare ``muster train`` with TRL's SFTTrainer and the transformers Trainer on the same chat data: step time and memory.

All train the same tiny model on the CPU, one process after the other, several times in turn: the speed of a shared
machine changes from minute to minute, so only the ratio within a pair counts. ``python benchmarks/fine_tuning.py --pairs 3``
prints a table. The losses are equal: tests/ranks/test_equal_to_trl.py.
"""

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
STEPS, SKIPPED, BATCH, LENGTH = 60, 10, 8, 256


def main() -> None:
    """Run the pairs and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--child", choices=tuple(CHILDREN))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.child:
        CHILDREN[options.child](options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(folder)
        measured: dict[str, list[dict[str, float]]] = {child: [] for child in CHILDREN}
        for pair in range(options.pairs):
            for child in sorted(CHILDREN, reverse=bool(pair % 2)):
                measured[child].append(run(child, folder))
    for child, results in measured.items():
        step_ms = statistics.median(one["step_ms"] for one in results)
        memory = statistics.median(one["peak_mib"] for one in results)
        print(f"{child:7} {step_ms:7.1f} ms per step, peak memory {memory:5.0f} MiB")
    for other in [child for child in CHILDREN if child != "muster"]:
        ratios = [
            mine["step_ms"] / theirs["step_ms"]
            for mine, theirs in zip(measured["muster"], measured[other], strict=True)
        ]
        print(f"step time, muster / {other}: {', '.join(f'{one:.2f}' for one in ratios)}")


def write_job(folder: Path) -> None:
    """Write the model and the chats."""
    import tiny_models

    random.seed(1)
    tiny_models.make_model(
        folder / "model",
        "byte-level",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        max_position_embeddings=512,
    )
    template = tiny_models.CHAT_TEMPLATE.replace(
        "{{ message.content }}<|im_end|>\n",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}",
    )
    (folder / "model" / "chat_template.jinja").write_text(template)
    chats = [
        {
            "messages": [
                {"role": "user", "content": " ".join(random.choices(tiny_models.LINES, k=1))},
                {
                    "role": "assistant",
                    "content": " ".join(random.choices(tiny_models.LINES, k=random.randint(1, 8))),
                },
            ]
        }
        for _ in range(STEPS * BATCH)
    ]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(one) for one in chats))


def run(child: str, folder: Path) -> dict[str, float]:
    """Measure one process."""
    words = [sys.executable, __file__, "--child", child, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(moments: list[float]) -> None:
    """Print the median step time, without the first steps, and the peak memory."""
    steps = [after - before for before, after in itertools.pairwise(moments)]
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step_ms = 1000 * statistics.median(steps[SKIPPED:])
    print(json.dumps({"step_ms": step_ms, "peak_mib": peak_kib / 1024}))


def muster(folder: Path) -> None:
    """Train as a rank of ``muster train`` does, with checkpoints off."""
    from torchmuster.train.step import TrainStep
    from torchmuster.worker.__main__ import main as train

    moments: list[float] = []
    apply = TrainStep.apply

    def timed(self: TrainStep) -> Any:
        result = apply(self)
        moments.append(time.perf_counter())
        return result

    TrainStep.apply = timed  # type: ignore[method-assign]
    settings = {
        "model.model_name_or_path": folder / "model",
        "data.files": folder / "data.jsonl",
        "data.sequence_length": LENGTH,
        "data.pack": "false",
        "data.shuffle": "false",
        "train.steps": STEPS,
        "train.global_batch_size": BATCH,
        "train.clip_norm": 1,
        "checkpoint.every": "never",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    train(["--device", "cpu", *words])
    report(moments)


def trl(folder: Path) -> None:
    """Train with TRL's SFTTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            moments.append(time.perf_counter())

    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_length=LENGTH,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
        logging_steps=10,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    ).train()
    report(moments)


def trainer(folder: Path) -> None:
    """Train with the transformers Trainer, on the tokens and labels that muster train makes."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from torchmuster.train.data.formats import RecordFormat, RecordTokenizer
    from torchmuster.train.data.tokenizers import TransformersTokenizer

    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            moments.append(time.perf_counter())

    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    convert = RecordTokenizer(
        RecordFormat(kind="chat"), TransformersTokenizer(str(folder / "model"))
    )
    rows = [
        {"input_ids": list(one.ids[:LENGTH]), "labels": list(one.labels or ())[:LENGTH]}
        for one in convert.documents(records)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=10,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    Trainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        arguments,
        train_dataset=rows,  # type: ignore[arg-type]
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        callbacks=[Clock()],
    ).train()
    report(moments)


CHILDREN = {"muster": muster, "trainer": trainer, "trl": trl}

if __name__ == "__main__":
    main()
