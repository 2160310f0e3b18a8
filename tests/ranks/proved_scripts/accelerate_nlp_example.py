"""Fine-tune a classifier of sequences, after Accelerate's ``complete_nlp_example.py``: a folder for each saved step."""

import argparse
import hashlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def tokenize(index):
    tokens = torch.randint(2, 64, (12,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": int(tokens[0] > 32)}


def collate(samples):
    batch = {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}
    batch["labels"] = torch.tensor([sample["labels"] for sample in samples])
    return batch


def training_function(args):
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(42)
    train_dataloader = DataLoader(
        [tokenize(index) for index in range(64)],
        batch_size=args.per_device_train_batch_size,
        shuffle=True,
        collate_fn=collate,
    )
    eval_dataloader = DataLoader(
        [tokenize(index) for index in range(1000, 1032)], batch_size=8, collate_fn=collate
    )
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, 4, len(train_dataloader) * args.num_epochs
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        dirs = [entry for entry in os.scandir(args.output_dir) if entry.name.startswith("step_")]
        path = max(dirs, key=lambda entry: int(entry.name.removeprefix("step_"))).path
        if args.resume_from_checkpoint != "last":
            path = args.resume_from_checkpoint
        accelerator.load_state(path)
        overall_step = int(path.rpartition("step_")[2])
        starting_epoch = overall_step // len(train_dataloader)
        resume_step = overall_step - starting_epoch * len(train_dataloader)
    accelerator.print(f"begins at step {overall_step}")
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        train_dataloader.set_epoch(epoch)
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(f"{args.output_dir}/step_{overall_step}")
        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            gathered = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += int((gathered[0] == gathered[1]).sum())
        accelerator.print(f"epoch {epoch}: accuracy {right / 32:.3f}")
    weights = accelerator.unwrap_model(model).state_dict().values()
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
    accelerator.print(f"final {digest.hexdigest()[:16]} at step {overall_step}")
    accelerator.end_training()
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--checkpointing_steps", type=int, default=3)
    parser.add_argument("--resume_from_checkpoint", help="a folder, or last")
    parser.add_argument("--output_dir", default="out")
    # The model lives until the exit: gloo of torch 2.13 can deadlock where DDP is freed at once after a collective.
    trained = training_function(parser.parse_args())
