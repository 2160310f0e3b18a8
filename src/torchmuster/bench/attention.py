"""Kinds of attention by the length of a sequence: the question to a process with torch, and its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.probing import run_probe

PROGRAM = "torchmuster.bench.probes.attention"
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS_QUICK = (128, 256)
# A call that takes longer is left out, unless its length was asked for.
LONGEST_S = 0.5
# In this order they are tried and shown.
KINDS: Mapping[str, str] = {
    "plain": "softmax(QK')V, written out",
    "sdpa": "scaled_dot_product_attention with what torch chooses by itself",
    "math": "its backend MATH",
    "flash": "its backend FLASH_ATTENTION",
    "efficient": "its backend EFFICIENT_ATTENTION",
    "cudnn": "its backend CUDNN_ATTENTION",
    "flex": "flex_attention, compiled",
}


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """Which attention is computed."""

    device: Literal["auto", "cpu"]
    number_type: Literal["auto", "float32", "bfloat16", "float16"]
    lengths: tuple[int, ...]
    batch: int
    heads: int
    head_size: int
    causal: bool
    kinds: tuple[str, ...] = tuple(KINDS)
    rounds: int = 11
    longest_s: float | None = LONGEST_S
    least_sample_s: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kind at one length; what was left out has the reason instead of times."""

    kind: str
    length: int
    forward_s: tuple[float, ...] = ()  # without gradients
    training_s: tuple[float, ...] = ()  # forward and backward
    forward_bytes: int | None = None  # at most, beside queries, keys and values
    training_bytes: int | None = None
    error: float | None = None  # against float64: norm of the difference over the norm
    right: bool = True
    left_out: str = ""
    forward_only: str = ""  # why there is no backward, where there is none


@dataclass(frozen=True, kw_only=True)
class AttentionAnswer:
    """What the process found."""

    device: str
    device_name: str
    number_type: str
    threads: int
    missing: Mapping[str, str]  # kinds that do not exist here, and why
    measured: tuple[Measured, ...]
    compile_s: float | None = None  # of flex_attention, all lengths together


def measure(
    request: AttentionRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> AttentionAnswer:
    """Compute in a process of its own."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        AttentionAnswer,
        device=device,
        doing="computing attention",
        say=say,
    )
    return answer
