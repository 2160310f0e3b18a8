"""Hugging Face's Trainer with a tiny GPT-2."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same in every process."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    max_steps=12,
    logging_steps=4,
    save_steps=6,
    eval_strategy="steps",
    eval_steps=12,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
trainer.train()
