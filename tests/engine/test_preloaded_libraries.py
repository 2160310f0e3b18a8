"""Libraries that are imported before ranks are forked must not start CUDA, which a forked process cannot use."""

import subprocess
import sys

import pytest

from patience import GIVE_UP_S
from torchmuster.launch.node import warm_agent
from torchmuster.prove import forked_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# A build for CPUs has no functions that start CUDA, so those that call them record who does.
RECORDS_CALLS = """
import importlib, sys, traceback
import torch

def record(module, name, answer):
    def call(*arguments, **more):
        print(name, "".join(traceback.format_stack(limit=12)), flush=True)
        return answer
    setattr(module, name, call)

for module in (torch.cuda, torch.accelerator):
    record(module, "is_available", False)
    record(module, "device_count", 0)
record(torch.cuda, "_lazy_init", None)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
EVERY_LIBRARY = "\n".join(f"import {name}" for name in forked_ranks._LIBRARIES)


def calls(*names: str) -> str:
    words = [sys.executable, "-c", RECORDS_CALLS, *names]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=GIVE_UP_S
    ).stdout


@pytest.mark.nightly
def test_no_preloaded_library_starts_cuda() -> None:
    names = forked_ranks.preloaded(EVERY_LIBRARY, gpus=True)
    assert calls(*dict.fromkeys([*names, *warm_agent._TORCH, *warm_agent._WORKER])) == ""


@pytest.mark.nightly
def test_a_library_that_starts_cuda_is_seen() -> None:
    assert "device_count" in calls("bitsandbytes")


def test_the_trainer_is_not_preloaded_for_gpus() -> None:
    script = "from transformers import Trainer"
    assert "transformers.trainer" not in forked_ranks.preloaded(script, gpus=True)
    assert "transformers.trainer" in forked_ranks.preloaded(script, gpus=False)
