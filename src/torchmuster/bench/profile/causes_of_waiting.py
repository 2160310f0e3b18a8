"""Ranks that wait: for data, for values on their way to the host, for a save, for another rank."""

import dataclasses
import math
from collections.abc import Sequence

from torchmuster.bench.profile import gains
from torchmuster.bench.profile.analysis import Analysis
from torchmuster.bench.profile.cause import (
    WORTH_FROM,
    Cause,
    confirmed,
    on_device_gain,
    phase_gain,
    share_s,
    tried,
)
from torchmuster.bench.profile.changes import Change, Trial
from torchmuster.bench.profile.usual_steps import mean_s
from torchmuster.pages.figures import amount

_READ_EVERY = 100
_SAVING_AT_MOST = 0.01
_STARVED_ALIKE = 0.5  # of the rank that waits most, the one that waits least has at least this
_MOST_RANKS = 8
_PHASE_FIXES = {
    "data": "look at what rank {rank} reads from on {host}: the same storage, the same number of loader "
    "workers, as many samples as the others?\nmuster bench data     on {host} and on another machine",
    "forward": "compare rank {rank}'s device and inputs with the others': longer samples, a hot or shared device?\n"
    "muster doctor && muster bench matmul     on {host} and on another machine",
    "compute": "compare rank {rank}'s device and inputs with the others': longer samples, a hot or shared device?\n"
    "muster doctor && muster bench matmul     on {host} and on another machine",
    "backward": "compare rank {rank}'s device and inputs with the others': hooks or work on this rank only, a hot or "
    "shared device?\nmuster doctor && muster bench matmul     on {host} and on another machine",
}


def starved_loader(analysis: Analysis, trials: Sequence[Trial]) -> Cause | None:
    """Find ranks that all wait for their data."""
    loader = analysis.facts[0].loader
    waits = [share_s(analysis, rank, "data") for rank in range(len(analysis.ranks))]
    if loader is None or min(waits) < _STARVED_ALIKE * max(waits):
        return None
    part = min(waits) / analysis.step_s
    trial = tried(trials, "workers")
    workers = gains.workers_needed(analysis.steps, loader.workers)
    workers = workers if trial is None else trial.change.value
    computed = gains.of_workers(analysis.steps, loader.workers, workers)
    if max(computed, on_device_gain(analysis, "data")) < WORTH_FROM:
        return None
    who = "the training's own process, so nothing is computed meanwhile"
    if loader.workers:
        who = f"{loader.workers} workers, which do not keep up"
    cause = Cause(
        name="starved-loader",
        what=f"the loader has {part:.0%} of the step",
        would=f"{workers} workers would give",
        gain=computed,
        known_by="trace",
        why=f"every rank waits {amount(min(waits), 's')} of {amount(analysis.step_s, 's')} for its next batch; "
        f"it is read by {who}",
        fix=f"DataLoader(..., num_workers={workers}, persistent_workers=True)\n"
        f"or in the settings: data: {{workers: {workers}}}",
        evidence=f"{loader.dataset}, num_workers={loader.workers}, "
        f"{loader.samples_per_batch or 'unknown'} samples a batch",
        change=Change(kind="workers", value=workers),
    )
    if trial is None:
        return cause
    if confirmed(trial):
        # Beyond what the wait itself is, a trial has met another machine than the profile has.
        gain = min(trial.gain, gains.of_phase(analysis.steps, "data"))
        return dataclasses.replace(cause, gain=gain, known_by="trial", change=trial.change)
    return dataclasses.replace(  # more workers have no cores to run on
        cause,
        would="without that wait it would be",
        gain=gains.of_phase(analysis.steps, "data"),
        fix=f"{trial.change} were tried and gave {trial.gain:.2f}x: the machine has no cores left for them. "
        "Make a sample cheaper:\ndecode and resize once, beforehand, and keep the result",
        change=None,
    )


def host_reads(analysis: Analysis, _: Sequence[Trial]) -> Cause | None:
    """Find values that are brought to the host in every step."""
    gain = phase_gain(analysis, "reads", left=1 / _READ_EVERY)
    if gain < WORTH_FROM:
        return None
    reads_s = max(one.shares.reads_s for one in analysis.ranks)
    count = max(one.reads for step in analysis.steps for one in step.values())
    return Cause(
        name="host-reads",
        what=f"values read to the host have {reads_s / analysis.step_s:.0%} of the step",
        would=f"reading them every {_READ_EVERY} steps would give",
        gain=gain,
        known_by="trace",
        why="each .item(), .tolist(), .cpu() or .numpy() makes the host wait for the value and copy it, and nothing new is "
        "computed until it has it",
        fix=f"if step % {_READ_EVERY} == 0: history.append(loss.item())\n"
        f"in between keep loss.detach(); in the settings: train: {{log_every: {_READ_EVERY}}}",
        evidence=f"{count} reads and {amount(reads_s, 's')} in a step of {amount(analysis.step_s, 's')}",
        change=Change(kind="reads", value=_READ_EVERY),
    )


def many_saves(analysis: Analysis, _: Sequence[Trial]) -> Cause | None:
    """Find saves that take more than they need to."""
    saves = sum(max(one.saves for one in step.values()) for step in analysis.steps)
    if not saves:
        return None
    saves_s = max(share_s(analysis, rank, "save") for rank in range(len(analysis.ranks)))
    one_s = saves_s * len(analysis.steps) / saves
    every = len(analysis.steps) / saves
    without_s = max(analysis.step_s - saves_s, 1e-9)
    seldom = math.ceil(one_s / (_SAVING_AT_MOST * without_s))
    times = max(math.ceil(seldom / every), 2)
    gain = gains.of_phase(analysis.steps, "save", left=1 / times)
    if gain < WORTH_FROM:
        return None
    steps = round(every * times)
    return Cause(
        name="many-saves",
        what=f"saving has {saves_s / analysis.step_s:.0%} of the time",
        would=f"saving every {steps} steps would give",
        gain=gain,
        known_by="trace",
        why=f"a save takes {amount(one_s, 's')}, and there is one {_often(every)}; every {steps} steps it would be "
        f"{_SAVING_AT_MOST:.0%} of the time",
        fix=f"if step % {steps} == 0: torch.save(...)\n"
        f"or let it be written beside the training: checkpoint: {{every: {steps}, mode: async}}",
        evidence=f"{saves} saves in {len(analysis.steps)} steps of {amount(analysis.step_s, 's')}",
        change=Change(kind="saves", value=times),
    )


def _often(every: float) -> str:
    return "in every step" if every <= 1 else f"every {every:.3g} steps"


def straggler(analysis: Analysis, _: Sequence[Trial]) -> Cause | None:
    """Find a rank that all others wait for, and what it does longer than they."""
    slow = analysis.slow
    if slow is None or not slow.matters or slow.phase not in _PHASE_FIXES or slow.gain < WORTH_FROM:
        return None
    facts = next(one for one in analysis.facts if one.rank == slow.rank)
    return Cause(
        name=f"straggler-{slow.phase}",
        what=f"rank {slow.rank} holds the others up, in its {slow.phase}",
        would="were it as fast as they are, that would give",
        gain=slow.gain,
        known_by="trace",
        why=f"it comes last to the gradients' exchange in {slow.last_in} of {slow.of_steps} steps, "
        f"{amount(slow.late_s, 's')} after the rank before it; its {slow.phase} takes {amount(slow.longer_s, 's')} longer "
        "than the others'. The others wait for it where gradients are exchanged, so that their steps look as long",
        fix=_PHASE_FIXES[slow.phase].format(rank=slow.rank, host=facts.host),
        evidence=_by_rank(analysis, slow.phase),
    )


def _by_rank(analysis: Analysis, phase: str) -> str:
    """Return a phase's time on the ranks, without their waiting for each other."""
    lines = []
    for one in analysis.ranks[:_MOST_RANKS]:
        rank = one.facts.rank
        if one.trace is not None and one.trace.on_device:
            mean = one.shares.by_name()[phase]
        else:
            mean = mean_s([{rank: step[rank]} for step in analysis.steps], phase)
        lines.append(f"rank {rank}: {phase} {amount(mean, 's')}")
    if len(analysis.ranks) > len(lines):
        lines.append(f"and {len(analysis.ranks) - len(lines)} more ranks")
    return "\n".join(lines)
