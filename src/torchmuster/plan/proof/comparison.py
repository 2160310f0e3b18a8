"""Compare a plan, which is stored in the run folder, with the run's measurements, in one line."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchmuster import untrusted
from torchmuster.errors import Impossible
from torchmuster.plan.estimate import TIME_BAND
from torchmuster.plan.job import Candidate
from torchmuster.runfolder import write_atomically
from torchmuster.units import format_bytes

FILE = "plan.json"
COMPARED_AFTER = 3  # steps: the first ones create the optimizer's states and warm up
MEMORY_BAND = 0.05


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a plan forecasts for one candidate on the hardware it was made for."""

    candidate: Candidate
    hardware: str  # as text: 8 x H100
    tensor_bytes: int  # peak of tensors on a rank in a step
    step_s: float | None = None  # None: not forecast


def write_promise(folder: Path, promise: Promise) -> None:
    """Write a promise into a run folder, to compare the run with."""
    folder.mkdir(parents=True, exist_ok=True)  # it may exist on the launcher's host only
    write_atomically(folder / FILE, msgspec.json.encode(promise).decode() + "\n")


def read_promise(folder: Path) -> Promise | None:
    """Return the promise of a run; None if no plan was made for it."""
    path = folder / FILE
    try:
        return untrusted.read_typed(path, msgspec.json.Decoder(Promise).decode)
    except FileNotFoundError:
        return None
    except (OSError, untrusted.Unreadable) as error:
        raise Impossible(
            f"the plan of this run cannot be read: {path}",
            why=str(error),
            fix="delete the file; training then continues without a comparison",
        ) from error


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What a run has measured so far."""

    steps: int
    step_s: float
    tensor_bytes: int | None  # None if the device does not count them


def comparison_line(promise: Promise, measured: MeasuredRun) -> str:
    """Return one line that compares a run with its plan."""
    parts = [*_of_memory(promise, measured), *_of_time(promise, measured)]
    return f"plan after step {measured.steps}: {'; '.join(parts)}"


def _of_memory(promise: Promise, measured: MeasuredRun) -> list[str]:
    if measured.tensor_bytes is None:
        return ["memory is not measured on the CPU; muster plan --verify measures it"]
    ratio = measured.tensor_bytes / promise.tensor_bytes
    text = (
        f"memory {format_bytes(measured.tensor_bytes)} of {format_bytes(promise.tensor_bytes)} "
        f"planned ({signed_percent(ratio)})"
    )
    if ratio > 1 + MEMORY_BAND:
        text += ", more than planned: an evaluation or longer samples may run out of memory"
    return [text]


def _of_time(promise: Promise, measured: MeasuredRun) -> list[str]:
    if promise.step_s is None:
        return []
    ratio = measured.step_s / promise.step_s
    text = (
        f"a step takes {step_seconds(measured.step_s)}, planned {step_seconds(promise.step_s)} "
        f"({signed_percent(ratio)})"
    )
    if ratio > TIME_BAND:
        text += ", slower than planned: the shares in the step line show what it waits for"
    return [text]


def signed_percent(ratio: float) -> str:
    """Format a ratio as a signed difference in percent: ``+3.1 %``."""
    return f"{(ratio - 1) * 100:+.1f} %"


def step_seconds(amount: float) -> str:
    """Format the time of a step with three significant digits."""
    return f"{amount * 1000:.3g} ms" if amount < 1 else f"{amount:.3g} s"
