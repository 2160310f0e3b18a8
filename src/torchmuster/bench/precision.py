"""What a number type gives a training: the question to a process with torch, and its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.bench.stability import Course
from torchmuster.plan.job import Work

PROGRAM = "torchmuster.bench.probes.precision"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SMALL_GPT = Work(
    build="torchmuster.bench.probes.small_gpt:make",
    dataset="torchmuster.bench.probes.learnable_rows:make",
    loss="language_model",
)


@dataclass(frozen=True, kw_only=True)
class PrecisionRequest:
    """What is trained, for how long, and how often a step is timed."""

    device: Literal["auto", "cpu"]
    work: Work
    micro_batch_size: int
    steps: int  # that are trained in each precision from the same weights, with the same data
    rounds: int  # of timed steps
    study: bool  # whether models that are made to be unstable are trained as well
    warm_up_s: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Way:
    """A training in one precision."""

    precision: str
    step_s: tuple[float, ...]
    peak_bytes: int  # of tensors on the device, in a step
    losses: tuple[float | None, ...]  # of each step; None: not finite
    held_loss: float | None  # after the last step, on samples that were not trained on
    output_error: (
        float | None
    )  # of the first outputs against float64: norm of the difference over the norm
    skipped: int  # tries of a step that were not applied, since a gradient was not finite
    scale: float | None = None  # of the loss at the end, where it is scaled
    trouble: str = ""  # the first step that failed for another reason than the scale of the loss


@dataclass(frozen=True, kw_only=True)
class PrecisionAnswer:
    """What the process found; fp32 is the first of the ways."""

    device: str
    device_name: str
    parameter_count: int
    ways: tuple[Way, ...]
    missing: Mapping[str, str]  # precisions that this device has not, and why
    other_order_loss: float | None  # of fp32 when the same data comes in another order
    courses: tuple[Course, ...] = ()  # of the models that are made to be unstable


def measure(
    request: PrecisionRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> PrecisionAnswer:
    """Train and time in a process of its own."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        PrecisionAnswer,
        device=device,
        folder=request.work.folder,
        doing="training in each precision",
        say=say,
    )
    return answer


# Instructions that multiply 16-bit numbers faster than 32-bit ones, by /proc/cpuinfo's names for them.
_UNITS = {
    "bf16": {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "BF16 of Arm"},
    "fp16": {"amx_fp16": "AMX", "avx512_fp16": "AVX-512 FP16", "asimdhp": "FP16 of Arm"},
}


def units_of_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, tuple[str, ...]] | None:
    """Return what this CPU has for bf16 and fp16, possibly nothing; None where nobody says."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            flags = next(
                (set(one.split()) for one in lines if one.startswith(("flags", "Features"))), None
            )
    except OSError:
        return None
    if flags is None:
        return None
    return {
        kind: tuple(name for flag, name in known.items() if flag in flags)
        for kind, known in _UNITS.items()
    }
