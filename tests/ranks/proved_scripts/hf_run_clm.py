"""Train a tiny GPT-2, after transformers' ``run_clm.py``: it resumes by itself from the last checkpoint of its folder."""

import hashlib
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

DEFAULTS = [
    *("--output_dir", "out", "--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True"),
    *("--num_train_epochs", "3", "--per_device_train_batch_size", "4", "--save_steps", "3"),
    *("--eval_strategy", "epoch", "--learning_rate", "1e-3", "--save_total_limit", "3"),
]


class Blocks(Dataset):
    """Blocks of 16 tokens of a text."""

    def __init__(self, count, seed):
        text = torch.randint(0, 64, (count * 16,), generator=torch.Generator().manual_seed(seed))
        self.blocks = text.view(count, 16)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index].clone()}


def main():
    parser = HfArgumentParser(TrainingArguments)
    (training_args,) = parser.parse_args_into_dataclasses([*DEFAULTS, *sys.argv[1:]])
    last_checkpoint = None
    if Path(training_args.output_dir).is_dir():
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=Blocks(64, seed=0),
        eval_dataset=Blocks(16, seed=1),
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
    weights = trainer.model.state_dict().values()
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
    if trainer.is_world_process_zero():
        print(f"final {digest.hexdigest()[:16]} at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
