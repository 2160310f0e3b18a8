"""Hugging Face's Trainer with its own argument parser; rank 1 is killed once, after a checkpoint."""

import os
import signal
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same in every process."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class KilledOnce(TrainerCallback):
    """Kills rank 1 after step 9."""

    def on_train_begin(self, args, state, control, **_):
        print(f"begins at step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 9 and args.process_index == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
trainer = Trainer(
    GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=[KilledOnce()]
)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
