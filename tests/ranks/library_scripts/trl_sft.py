"""TRL's SFTTrainer on tokens that are given."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
)
rows = [" ".join(str((start + place) % 62) for place in range(12)) for start in range(64)]
trainer = SFTTrainer(
    GPT2LMHeadModel(config),
    args=SFTConfig(
        "out",
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=2,
        save_steps=6,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"text": rows}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ),
)
trainer.train()
