"""A Hugging Face Trainer that saves when it gets SIGTERM (``enable_jit_checkpoint``), stopped under muster or torchrun.

::

    PYTHONPATH=tests python tests/ranks/jit_checkpoint.py --times 20            # under muster run
    PYTHONPATH=tests python tests/ranks/jit_checkpoint.py --times 20 --torchrun

Each time two CPU ranks train a tiny random model and the launcher gets SIGTERM; then the checkpoint is examined.

A step sleeps for 0.2 s. The Trainer lets each rank act on its own signal, at the next of several places in a step: with steps of
a few milliseconds, the ranks can act at different places, and their collectives no longer match, under torchrun too.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from muster_command import muster_argv
from patience import GIVE_UP_S

SCRIPT = """\
import os, time, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            print("training", os.environ["RANK"], flush=True)

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
model.register_forward_pre_hook(lambda *_: time.sleep(0.2))
data = [{"input_ids": (ids := torch.randint(0, 64, (16,))), "labels": ids} for _ in range(64)]
arguments = TrainingArguments(
    output_dir="out", enable_jit_checkpoint=True, max_steps=1_000_000, per_device_train_batch_size=2,
    save_strategy="no", logging_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Say()])
trainer.train()
print("ended", os.environ["RANK"], flush=True)
"""
_RANKS = 2
_FILES = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt")


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """How a training ended that was asked to stop; ``saved`` are its complete checkpoints."""

    code: int
    took_s: float
    saved: tuple[str, ...]
    torn: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        return (
            f"exit code {self.code} after {self.took_s:.1f} s, saved {self.saved}, torn {self.torn}"
        )


def stop_training(folder: Path, *, torchrun: bool = False) -> Stopped:
    """Start the training, send SIGTERM to its launcher once both ranks train, and wait for its end."""
    (folder / "train.py").write_text(SCRIPT)
    words = ["run", "--device", "cpu", "--ranks", str(_RANKS), "train.py"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*agent, f"--nproc-per-node={_RANKS}", "train.py"] if torchrun else muster_argv(words)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as launcher:
        assert launcher.stdout is not None
        alarm = threading.Timer(GIVE_UP_S, launcher.kill)
        alarm.start()
        try:
            for line in launcher.stdout:
                lines.append(line)
                if _trains("".join(lines)):
                    break
            asked_s = time.monotonic()
            launcher.send_signal(signal.SIGTERM)
            lines += launcher.stdout
            code = launcher.wait()
        finally:
            alarm.cancel()
    checkpoints = sorted((folder / "out").glob("checkpoint-*"))
    saved = tuple(one.name for one in checkpoints if is_complete(one))
    return Stopped(
        code=code,
        took_s=time.monotonic() - asked_s,
        saved=saved,
        torn=tuple(one.name for one in checkpoints if one.name not in saved),
        output="".join(lines),
    )


def _trains(output: str) -> bool:
    return all(f"training {rank}\n" in output for rank in range(_RANKS))


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has all its files and can be loaded."""
    if (checkpoint / "checkpoint-is-incomplete.txt").exists():
        return False
    names = (*_FILES, *(f"rng_state_{rank}.pth" for rank in range(_RANKS)))
    if not all((checkpoint / name).is_file() for name in names):
        return False
    return bool(torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"])


def main() -> None:
    """Stop a training so many times, and print how often it saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    good = 0
    for number in range(1, options.times + 1):
        with tempfile.TemporaryDirectory() as folder:
            stopped = stop_training(Path(folder), torchrun=options.torchrun)
        good += bool(stopped.saved)
        print(f"{number:>3} {stopped}", flush=True)
        if not stopped.saved or stopped.torn:
            print(stopped.output, flush=True)
    print(f"saved {good} of {options.times}", flush=True)


if __name__ == "__main__":
    main()
