"""TRL's SFTTrainer on prompts and completions of different lengths, with a flag to resume."""

import argparse
import hashlib

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

set_seed(0)
words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
config = GPT2Config(vocab_size=64, bos_token_id=1, eos_token_id=1, **sizes)


def count_up(start, length):
    return " ".join(str((start + place) % 62) for place in range(length))


rows = [
    {"prompt": count_up(start, 4), "completion": " " + count_up(start + 4, 3 + start % 9)}
    for start in range(64)
]
trainer = SFTTrainer(
    GPT2LMHeadModel(config),
    args=SFTConfig(
        "out",
        num_train_epochs=3,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=False,
        save_steps=3,
        save_total_limit=3,
        seed=0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ),
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if options.resume else None)
weights = trainer.model.state_dict().values()
digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
if trainer.is_world_process_zero():
    print(f"final {digest.hexdigest()[:16]} at step {trainer.state.global_step}", flush=True)
