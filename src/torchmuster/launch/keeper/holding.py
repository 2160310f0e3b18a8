"""What a machine gives to a run: its devices, chosen and claimed, or its processor."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.devices import snapshot
from torchmuster.devices.acquire import Held, acquire
from torchmuster.devices.claims import TOKEN_VARIABLE, Claims
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.request import Request
from torchmuster.devices.visibility import STAGES, variables_for, visible
from torchmuster.errors import MusterError
from torchmuster.launch import wire


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The devices held for the run, what the ranks are told of them, and why these."""

    ranks: int
    devices: tuple[str, ...]
    variables: dict[str, str | None]
    threads: int
    reasons: tuple[str, ...]
    held: Held | None = None

    def release(self) -> None:
        """Give the devices back."""
        if self.held is not None:
            self.held.release()


def take(prepare: wire.Prepare, on_wait: Callable[[MusterError], None]) -> Holding:
    """Choose and claim what the launcher asked for; raises what ``acquire`` raises."""
    node = snapshot.take_with_history()
    seen = visible(node.accelerators, os.environ).devices
    if prepare.device == "cpu" or (prepare.device == "auto" and not seen and not prepare.gpu_ids):
        return _cpu(prepare, has_accelerators=bool(node.accelerators))
    request = Request(
        ids=None if prepare.gpu_ids is None else tuple(prepare.gpu_ids),
        count=prepare.ranks,
        share=prepare.share,
    )
    held = acquire(
        Claims.here(os.environ),
        snapshot.take_with_history,
        request,
        environment=os.environ,
        wait_s=prepare.wait_s,
        on_wait=on_wait,
        command=["muster", "run", *prepare.command],
    )
    devices = held.decision.value
    threads, reason = _threads(len(devices))
    variables: dict[str, str | None] = {**variables_for(devices)}
    variables[TOKEN_VARIABLE] = ",".join(held.tokens)
    return Holding(
        ranks=len(devices),
        devices=tuple(f"{one.label} {one.name}" for one in devices),
        variables=variables,
        threads=threads,
        reasons=(held.decision.reason, reason),
        held=held,
    )


def _cpu(prepare: wire.Prepare, *, has_accelerators: bool) -> Holding:
    ranks = prepare.ranks or 1
    threads, reason = _threads(ranks)
    if prepare.device == "cpu":
        why = "the CPU, as asked"
    elif has_accelerators:
        why = "the CPU: no GPU of this machine is visible"
    else:
        why = "the CPU: this machine has no GPU"
    hidden: dict[str, str | None] = {}
    if has_accelerators:
        hidden = {stage[0]: "" for stages in STAGES.values() for stage in stages[:1]}
    return Holding(
        ranks=ranks,
        devices=("CPU",),
        variables=hidden,
        threads=threads,
        reasons=(why, reason),
    )


def _threads(ranks: int) -> tuple[int, str]:
    """Share the cores among the ranks of this machine."""
    cores = usable_cores()
    threads = max(1, cores.value // ranks)
    if os.environ.get("OMP_NUM_THREADS"):
        given = os.environ["OMP_NUM_THREADS"]
        return threads, f"OMP_NUM_THREADS={given}, as the environment has it"
    each = "thread" if threads == 1 else "threads"
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return threads, f"{threads} {each} per rank ({cores.value} usable cores / {count})"
