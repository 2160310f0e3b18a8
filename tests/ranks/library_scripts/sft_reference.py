"""Per-step losses of TRL's SFTTrainer, or of the transformers Trainer, for a comparison with muster train.

``sft_reference.py MODEL DATA RESULT BATCH LENGTH``: DATA is JSON lines with ``messages``, with a prompt and a completion, or
with ``input_ids`` and ``labels`` (then the Trainer is used). BATCH is per rank.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

model_folder, data, result, batch, length = sys.argv[1:]
records = [json.loads(line) for line in Path(data).read_text().splitlines()]
losses: list[float] = []


class Recorded:
    """Records the loss of each step before the Trainer rounds it."""

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)  # type: ignore[misc]
        losses.append(float(self.accelerator.gather(loss.detach()).mean()))  # type: ignore[attr-defined]
        return loss


class Sft(Recorded, SFTTrainer):
    """TRL's."""


class Plain(Recorded, Trainer):
    """The one of transformers."""


common = {
    "output_dir": f"{result}.out",
    "per_device_train_batch_size": int(batch),
    "max_steps": 50,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "sequential",
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
    "disable_tqdm": True,
    "logging_strategy": "no",
}
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
model.config.use_cache = False
trainer: Any
if "input_ids" in records[0]:
    trainer = Plain(model, TrainingArguments(**common), train_dataset=records)  # type: ignore[arg-type]
else:
    arguments = SFTConfig(
        **common,  # type: ignore[arg-type]
        max_length=int(length),
        assistant_only_loss="messages" in records[0],
        gradient_checkpointing=False,
    )
    trainer = Sft(
        model,
        arguments,
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
trainer.train()
if os.environ.get("RANK", "0") == "0":
    Path(result).write_text(json.dumps(losses))
