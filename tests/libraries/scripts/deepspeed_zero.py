"""A DeepSpeed script with ZeRO stage 2; it fails once at a given step unless it was told to resume."""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=25)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--fail-at", type=int)
options = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
inputs = torch.randn(256, 32)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": options.stage},
}
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=0))
if options.resume:
    engine.load_checkpoint("checkpoints")
while engine.global_steps < options.steps:
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps} loss {loss.item()}", flush=True)
        if engine.global_steps % options.save_every == 0:
            engine.save_checkpoint("checkpoints")
        if engine.global_steps == options.fail_at and not options.resume:
            raise RuntimeError("injected")
        if engine.global_steps >= options.steps:
            break
