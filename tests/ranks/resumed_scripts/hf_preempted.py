"""Hugging Face's Trainer that gets SIGTERM and saves because of it."""

import os
import signal

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,))
        return {"input_ids": tokens, "labels": tokens}


class Preempted(TrainerCallback):
    """Sends SIGTERM after step 2; the Trainer waits some seconds and then saves."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=1,
    max_steps=1_000_000,
    save_strategy="no",
    logging_strategy="no",
    enable_jit_checkpoint=True,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=[Preempted()]
)
trainer.train()
