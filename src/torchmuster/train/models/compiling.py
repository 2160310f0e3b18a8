"""Compiling a model block by block: repeated layers share what was compiled, and names stay as they are."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from torchmuster.decision import Decision
from torchmuster.train.models.blocks import repeated_blocks


def can_compile(device: torch.device) -> Decision[bool]:
    """Say whether ``torch.compile`` has what it needs to make code for a device."""
    if device.type == "cpu":
        compiler = _cpp_compiler()
        if compiler is None:
            return Decision(
                value=False,
                reason="not compiled: there is no C++ compiler (g++ or clang++, or one named by CXX)",
            )
        # Also where code is made for the CPU, torch looks for CUDA, and warns if there is nvcc and no GPU.
        logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_cuda)
        return Decision(value=True, reason=f"compiled with {compiler}")
    if device.type in ("cuda", "xpu") and importlib.util.find_spec("triton") is None:
        return Decision(
            value=False,
            reason=f"not compiled: triton, which makes code for {device.type}, is missing",
        )
    return Decision(value=True, reason=f"compiled for {device.type}")


def compile_blocks(model: nn.Module, device: torch.device) -> Decision[int]:
    """Compile the repeated layers of a model in place, or the whole where nothing repeats.

    Returns how many were compiled: 0 where that is not possible here, with the reason. Comes after
    recomputing and before sharding.
    """
    possible = can_compile(device)
    if not possible.value:
        return Decision(value=0, reason=possible.reason)
    blocks = repeated_blocks(model) or [model]
    for block in blocks:
        if type(block).forward.__module__.startswith("torch."):
            # torch passes over its own code unless other code calls it, and compiles nothing then.
            block.forward = partial(_call, block.forward)
        block.compile()
    what = f"{len(blocks)} blocks" if len(blocks) > 1 else "the model as one"
    return Decision(value=len(blocks), reason=f"{what} {possible.reason}")


def _is_not_about_cuda(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("No CUDA runtime is found")


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _cpp_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)
