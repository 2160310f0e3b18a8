"""Hugging Face's Trainer; ``--fault`` plants one mistake."""

import argparse
import copy
import hashlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=4, help="per rank")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
parser.add_argument("--save-every", type=int, default=3, help="steps between checkpoints")
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--resume_from_checkpoint", help="a checkpoint, or last")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--ema", action="store_true")
parser.add_argument("--fault", default="none")
options = parser.parse_args()
fault = options.fault


class Samples(Dataset):
    """Each sample is a function of its index."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(self.first + index))
        return {"x": inputs, "labels": int(inputs[0] * inputs[1] > 0)}


class Classifier(nn.Module):
    """A small network that returns its loss, as the Trainer expects."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32) if options.batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(options.dropout),
            nn.Linear(32, 2),
        )

    def forward(self, x, labels):
        logits = self.network(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Average(TrainerCallback):
    """An exponential moving average of the weights, in a file of the checkpoint."""

    def on_train_begin(self, args, state, control, model, **_):
        self.model = copy.deepcopy(model).requires_grad_(False)
        if last and (Path(last) / "ema.pt").exists():
            self.model.load_state_dict(torch.load(Path(last) / "ema.pt", weights_only=True))

    def on_step_end(self, args, state, control, model, **_):
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            old.lerp_(new.data, 0.1)

    def on_save(self, args, state, control, **_):
        if state.is_world_process_zero and fault != "ema-not-saved":
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "ema.pt"
            torch.save(self.model.state_dict(), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)


class OwnTrainer(Trainer):
    """The Trainer, with what people override."""

    def get_train_dataloader(self):
        if fault == "own-loader":
            generator = torch.Generator().manual_seed(self.args.seed)
            return DataLoader(self.train_dataset, options.batch_size, True, generator=generator)
        return super().get_train_dataloader()

    def training_step(self, model, inputs, num_items_in_batch=None):
        if fault == "own-training-step":
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()
        return super().training_step(model, inputs, num_items_in_batch)


def checkpoint():
    """Return the checkpoint to resume from, or None."""
    if options.resume_from_checkpoint != "last":
        return options.resume_from_checkpoint
    if fault == "alphabetical-checkpoint":
        return str(max(options.out.glob("checkpoint-*")))
    return get_last_checkpoint(options.out)


arguments = TrainingArguments(
    str(options.out),
    num_train_epochs=options.epochs,
    per_device_train_batch_size=options.batch_size,
    gradient_accumulation_steps=options.accumulate,
    learning_rate=0.01,
    save_strategy="steps",
    save_steps=options.save_every,
    save_total_limit=3,
    save_only_model=fault == "save-only-model",
    ignore_data_skip=fault == "ignore-data-skip",
    ddp_broadcast_buffers=fault != "buffers-not-broadcast",
    eval_strategy="epoch",
    seed=1,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
set_seed(1)
model = Classifier()
average = Average()
last = checkpoint()
trainer = OwnTrainer(
    model,
    arguments,
    train_dataset=Samples(0, 64),
    eval_dataset=Samples(10_000, 32),
    callbacks=[average] if options.ema else [],
)
trainer.train(resume_from_checkpoint=None if fault == "resume-ignored" else last)
weights = [*model.state_dict().values()]
if options.ema:
    weights += average.model.state_dict().values()
digest = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in weights))
if trainer.is_world_process_zero():
    print(f"final {digest.hexdigest()[:16]} at step {trainer.state.global_step}", flush=True)
