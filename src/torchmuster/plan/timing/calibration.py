"""Rates measured on this machine instead of taken from the catalogue, stored with date and host.

The ranks measure their peak rates (products, memory, collectives; ``probes/rates.py``); the share
of them that training reaches is fitted to real steps (``fitting.py``).
"""

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from torchmuster import untrusted
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import MusterError
from torchmuster.plan.hardware.catalogue import Hardware, Link
from torchmuster.plan.proof import fresh_ranks
from torchmuster.plan.timing.rates import Rates, rate_key, usual_rates
from torchmuster.runfolder import write_atomically

PROGRAM = "torchmuster.plan.probes.rates"
FILE = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The request to the measuring ranks."""

    device: Literal["auto", "cpu"]


@dataclass(frozen=True, kw_only=True)
class RankRates:
    """The rates of one rank while all others also work."""

    flops: Mapping[str, float]
    bandwidth_bytes_s: float
    operation_s: float
    sharded_operation_s: float | None = None  # None: a single rank has no shards
    new_memory_bytes_s: float | None = None  # None: on a GPU
    slow_operations: Mapping[str, float] = field(default_factory=dict)  # by name, bytes per second
    collectives: Mapping[str, Link]  # by rates.rate_key
    # The shares of these rates that a training reaches, fitted to real steps.
    compute: float = 1.0
    memory: float = 1.0
    sharded_communication: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Everything that was measured on one machine."""

    machine: str
    date: str
    by_ranks: Mapping[int, RankRates]
    fitted_to: str = ""  # description of the real run
    device: Literal["cpu", "gpu"] = "cpu"
    cores: int | None = None  # that ranks on the CPU shared
    torch: str | None = None

    @property
    def source(self) -> str:
        """Where and when it was measured, as text."""
        fitted = f", fitted to {self.fitted_to}" if self.fitted_to else ""
        return f"measured on {self.machine} on {self.date}{fitted}"


def measure_calibration(
    ranks: Sequence[int],
    *,
    device: Literal["cpu", "gpu"] = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure this machine, for each of the numbers with that many ranks at once."""
    by_ranks = {}
    for number in ranks:
        say(f"measuring with {number} {'rank' if number == 1 else 'ranks'}")
        by_ranks[number] = _measure_with(number, device, say)
    return Calibration(
        machine=_calibration_machine(),
        date=datetime.date.today().isoformat(),
        by_ranks=by_ranks,
        device=device,
        cores=usable_cores().value,
        torch=_torch(),
    )


def _calibration_machine() -> str:
    return platform.node() or "this machine"


def _torch() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _measure_with(
    ranks: int, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> RankRates:
    asked = CalibrationRequest(device="cpu" if device == "cpu" else "auto")
    ran = fresh_ranks.run_fresh_ranks(
        PROGRAM,
        msgspec.json.encode(asked).decode(),
        ranks=ranks,
        device=device,
        folder=str(Path.cwd()),
        name="calibration",
        doing="measuring rates",
        say=say,
    )
    if ran.trouble is not None or len(ran.texts) != ranks:
        trouble = ran.trouble
        raise MusterError(
            f"the rates of this machine could not be measured with {ranks} ranks",
            why=trouble.what if trouble else f"{len(ran.texts)} of {ranks} ranks answered",
            fix=trouble.fix if trouble else "try again, or plan without --calibrate",
        )
    return weakest_rank([msgspec.json.decode(text, type=RankRates) for text in ran.texts.values()])


def weakest_rank(found: Sequence[RankRates]) -> RankRates:
    """Return the rates of the slowest rank, for which all others wait."""
    keys = set.intersection(*(set(one.collectives) for one in found))
    dtypes = [key for key in found[0].flops if all(key in one.flops for one in found)]
    return RankRates(
        flops={key: min(one.flops[key] for one in found) for key in dtypes},
        bandwidth_bytes_s=min(one.bandwidth_bytes_s for one in found),
        operation_s=max(one.operation_s for one in found),
        sharded_operation_s=max(one.sharded_operation_s or 0.0 for one in found) or None,
        new_memory_bytes_s=min(one.new_memory_bytes_s or 0.0 for one in found) or None,
        slow_operations={
            name: min(one.slow_operations[name] for one in found)
            for name in found[0].slow_operations
        },
        collectives={
            key: Link(
                latency_s=max(one.collectives[key].latency_s for one in found),
                bytes_s=min(one.collectives[key].bytes_s for one in found),
                source="measured",
            )
            for key in sorted(keys)
        },
    )


def as_known(calibration: Calibration | None, hardware: Hardware) -> tuple[Hardware, Rates]:
    """Return this machine and the rates to compute with: measured, or typical if not measured.

    A calibration of other hardware is ignored, and the rates' source says so.
    """
    as_usual = usual_rates(hardware.card.kind)
    if calibration is None:
        return hardware, as_usual
    if other := _of_something_else(calibration, hardware):
        source = (
            f"{as_usual.source}; the calibration of {calibration.date} is ignored, because it was made "
            f"{other} (muster plan --calibrate makes a new one)"
        )
        return hardware, dataclasses.replace(as_usual, source=source)
    measured = hardware_as_measured(calibration, hardware)
    return measured, calibrated_rates(calibration, measured)


def _of_something_else(calibration: Calibration, hardware: Hardware) -> str:
    """Return how the calibration differs from the planned hardware; empty if it matches."""
    if calibration.machine != _calibration_machine():  # several machines may share a cache folder
        return f"on {calibration.machine}, not on {_calibration_machine()}"
    names = {"cpu": "the CPU", "gpu": "GPUs"}
    device = "cpu" if hardware.card.kind == "cpu" else "gpu"
    if calibration.device != device:
        return f"on {names[calibration.device]}, not on {names[device]}"
    cores = usable_cores().value
    if device == "cpu" and calibration.cores != cores:
        return f"with {calibration.cores or 'an unknown number of'} cores, not with {cores}"
    if calibration.torch != _torch():
        return f"with torch {calibration.torch}, not with {_torch()}"
    return ""


def hardware_as_measured(calibration: Calibration, hardware: Hardware) -> Hardware:
    """Return this machine with the rates that were measured on it."""
    found = _for(calibration, hardware.cards_per_machine)
    card = dataclasses.replace(
        hardware.card,
        flops={**hardware.card.flops, **found.flops},
        bandwidth_bytes_s=found.bandwidth_bytes_s,
        source=calibration.source,
    )
    return dataclasses.replace(hardware, card=card, within=_within(calibration, hardware))


def _within(calibration: Calibration, hardware: Hardware) -> Link:
    """Return the link that gives the measured all-reduce times; unchanged if none was measured.

    Measured collectives use their measured rates; this link is for all others.
    """
    ranks = hardware.cards_per_machine
    sums = [
        one.collectives.get(rate_key("all_reduce", ranks)) for one in calibration.by_ranks.values()
    ]
    measured = next((one for one in sums if one is not None), None)
    if measured is None or ranks < 2:
        return hardware.within
    share = usual_rates(hardware.card.kind).communication
    return Link(
        latency_s=measured.latency_s / (2 * (ranks - 1)),
        bytes_s=measured.bytes_s * 2 * (1 - 1 / ranks) / share,
        source=calibration.source,
    )


def calibrated_rates(calibration: Calibration, hardware: Hardware) -> Rates:
    """Return the shares and collectives to compute with on this machine."""
    found = _for(calibration, hardware.cards_per_machine)
    collectives: dict[str, Link] = {}
    for one in calibration.by_ranks.values():
        collectives.update(one.collectives)
    as_usual = usual_rates(hardware.card.kind)
    return dataclasses.replace(
        as_usual,
        compute=found.compute,
        memory=found.memory,
        sharded_communication=found.sharded_communication,
        operation_s=found.operation_s,
        sharded_operation_s=found.sharded_operation_s or as_usual.sharded_operation_s,
        new_memory_bytes_s=found.new_memory_bytes_s or as_usual.new_memory_bytes_s,
        slow_operations=found.slow_operations,
        collectives=collectives,
        source=calibration.source,
    )


def _for(calibration: Calibration, ranks: int) -> RankRates:
    """Return the rates of a rank among this many others, or among the nearest measured number.

    Ranks on the CPU share its cores; a GPU belongs to one rank. More ranks than cores take turns:
    in a measurement a rank gets less than its share of a core, since it is preempted; in training
    it gets its share.
    """
    known = calibration.by_ranks
    on_cpu, cores = calibration.device == "cpu", calibration.cores
    if on_cpu and cores is not None and ranks > cores:
        known = {number: one for number, one in known.items() if number <= cores} or known
    if ranks in known:
        return known[ranks]
    nearest = min(known, key=lambda number: (abs(number - ranks), number))
    one = known[nearest]
    if not on_cpu:
        return one
    share = nearest / ranks
    return dataclasses.replace(
        one,
        flops={key: rate * share for key, rate in one.flops.items()},
        bandwidth_bytes_s=one.bandwidth_bytes_s * share,
        operation_s=one.operation_s / share,
        sharded_operation_s=one.sharded_operation_s and one.sharded_operation_s / share,
        new_memory_bytes_s=one.new_memory_bytes_s and one.new_memory_bytes_s * share,
        slow_operations={name: rate * share for name, rate in one.slow_operations.items()},
    )


def save_calibration(calibration: Calibration, folder: Path) -> Path:
    """Write the calibration into the cache folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomically(path, msgspec.json.encode(calibration).decode() + "\n", durable=False)
    return path


def saved_calibration(folder: Path) -> Calibration | None:
    """Return the calibration in the cache folder, for any hardware; None if there is none."""
    try:
        return untrusted.read_typed(folder / FILE, msgspec.json.Decoder(Calibration).decode)
    except (OSError, untrusted.Unreadable):
        return None
