"""Causes of slow training, such as threads, precision, communication, data, stragglers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.profile import gains
from torchmuster.bench.profile.analysis import Analysis
from torchmuster.bench.profile.changes import ChangeTrial, Kind, TriedChange
from torchmuster.bench.profile.gains import mean_s, transfer_s
from torchmuster.bench.profile.trials_wanted import (
    BATCH_TIMES,
    fitting_threads,
    in_full_precision,
    overlap_wanted,
)
from torchmuster.pages.charts import amount_text
from torchmuster.units import format_bytes

WORTH_FROM = 1.1  # smaller gains are not reported


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of slow training. ``would`` is the text before the gain."""

    name: str
    what: str
    would: str
    gain: float | None
    known_by: Literal["trace", "trial"]
    why: str
    fix: str
    evidence: str
    change: TriedChange | None = None
    another_training: bool = False  # the fix changes the numerical results


Look = Callable[[Analysis, Sequence[ChangeTrial]], Cause | None]


def tried_change(trials: Sequence[ChangeTrial], kind: Kind) -> ChangeTrial | None:
    """Return the trial of a kind of change, if there is one."""
    return next((one for one in trials if one.change.kind == kind), None)


def confirmed(trial: ChangeTrial, least: float = WORTH_FROM) -> bool:
    """Return whether a trial shows a large enough gain in every run with the change."""
    return trial.gain >= least and trial.low > 1.0


def share_s(analysis: Analysis, place: int, phase: str) -> float:
    """Return the time of a phase on one rank; with a device only its idle time."""
    return analysis.ranks[place].shares.by_name()[phase]


def on_device_gain(analysis: Analysis, phase: str, left: float = 0.0) -> float:
    """Return the gain on devices, limited by the device with the least of it."""
    traced = [one for one in analysis.ranks if one.trace is not None and one.trace.on_device]
    if not traced:
        return 1.0
    return 1 / (1 - min(one.shares.part(phase) for one in traced) * (1 - left))


def phase_gain(analysis: Analysis, phase: str, *, left: float) -> float:
    """Return the gain if a phase took only a part of its time on every rank."""
    if any(one.trace is not None and one.trace.on_device for one in analysis.ranks):
        return on_device_gain(analysis, phase, left)
    return gains.gain_of_phase(analysis.steps, phase, left=left)


_ANOTHER_PRECISION_FROM = 1.15
_ANOTHER_BATCH_FROM = 1.5


def too_many_threads(analysis: Analysis, trials: Sequence[ChangeTrial]) -> Cause | None:
    """Find ranks that have more threads than cores."""
    facts = analysis.facts[0]
    fitting, trial = fitting_threads(facts), tried_change(trials, "threads")
    if fitting is None or (trial is not None and not confirmed(trial)):
        return None
    switches = sum(one.switches for step in analysis.steps for one in step.values())
    each = switches / (len(analysis.steps) * len(analysis.ranks))
    return Cause(
        name="too-many-threads",
        what=f"{facts.ranks_here} ranks with {facts.threads} threads each share {facts.cores} "
        "cores",
        would=f"{fitting} {'thread' if fitting == 1 else 'threads'} each would give",
        gain=None if trial is None else trial.gain,
        known_by="trial",
        why="with more threads than cores, threads wait for each other after every operation",
        fix=f"torch.set_num_threads({fitting})     or for all ranks: OMP_NUM_THREADS={fitting}",
        evidence=f"{each:.0f} involuntary context switches per step and rank",
        change=TriedChange(kind="threads", value=fitting),
    )


def full_precision(analysis: Analysis, trials: Sequence[ChangeTrial]) -> Cause | None:
    """Find computation in fp32 that would be faster in bf16."""
    trial = tried_change(trials, "bf16")
    if not in_full_precision(analysis.facts[0]):
        return None
    on_device = analysis.facts[0].device != "cpu"
    if (trial is None and not on_device) or (
        trial is not None and not confirmed(trial, _ANOTHER_PRECISION_FROM)
    ):
        return None
    passes_s = mean_s(analysis.steps, "forward") + mean_s(analysis.steps, "backward")
    return Cause(
        name="full-precision",
        what="all computation is in fp32",
        would="bf16 would give",
        gain=None if trial is None else trial.gain,
        known_by="trial",
        why="weights stay in fp32; only matrix products are computed in 16 bits, which is faster "
        "on "
        f"{'most devices' if trial is None else 'this device'}",
        fix=f'with torch.autocast("{analysis.facts[0].device.partition(":")[0]}", dtype=torch.bfloat16):\n'
        "or in the settings: train: {precision: bf16}. Compare the losses of both precisions: muster bench precision",
        evidence=f"forward and backward take {amount_text(passes_s, 's')} of {amount_text(analysis.step_s, 's')}",
        change=TriedChange(kind="bf16"),
        another_training=True,
    )


def tiny_batch(analysis: Analysis, trials: Sequence[ChangeTrial]) -> Cause | None:
    """Find steps with too few samples for the fixed cost of a step."""
    trial = tried_change(trials, "batch")
    gain = gains.gain_of_batch(analysis.steps, BATCH_TIMES) if trial is None else trial.gain
    if gain < _ANOTHER_BATCH_FROM or (trial is not None and not confirmed(trial)):
        return _idling_device(analysis) if trial is None else None
    times = BATCH_TIMES if trial is None else trial.change.value
    loader = analysis.facts[0].loader
    size = loader.samples_per_batch if loader is not None else None
    fixed_s = transfer_s(analysis.steps) + mean_s(analysis.steps, "optimizer")
    batch = "the batch" if size is None else f"a batch of {size} samples"
    larger = f"{times} times as many" if size is None else f"{times * size} samples"
    return Cause(
        name="tiny-batch",
        what=f"{batch} is too small for the fixed cost of a step",
        would=f"{larger} would give{' at least' if trial is None else ''}",
        gain=gain,
        known_by="trace" if trial is None else "trial",
        why="gradient communication, the optimizer and operation launches cost the same for one "
        "sample as "
        "for many",
        fix=f"batch_size={'N' if size is None else times * size} with an adapted learning rate; "
        "or the same "
        "batch on fewer ranks\nwhat fits: muster plan --find-batch-size",
        evidence=f"communication and the optimizer take {amount_text(fixed_s, 's')} of "
        f"{amount_text(analysis.step_s, 's')}",
        change=TriedChange(kind="batch", value=times),
        another_training=True,
    )


def _idling_device(analysis: Analysis) -> Cause | None:
    """Find devices that idle between kernel launches; only a trial can tell the gain."""
    for one in analysis.ranks:
        small = one.trace.operations.smallness if one.trace and one.trace.on_device else None
        if small is not None and small.bound:
            return Cause(
                name="tiny-batch",
                what=f"rank {one.facts.rank}'s device idles {one.shares.part('idle'):.0%} of the step between small kernels",
                would="",
                gain=None,
                known_by="trial",
                why="a kernel finishes before the host has launched the next one: fewer, larger "
                "kernels would keep "
                "the device busy",
                fix=f"a larger batch, or model = torch.compile(model)\nwithout --no-trials, muster profile "
                f"tries {BATCH_TIMES} times the batch",
                evidence=f"{small.calls:,.0f} kernels per step, the median takes "
                f"{amount_text(small.median_s, 's')}",
                change=TriedChange(kind="batch", value=BATCH_TIMES),
                another_training=True,
            )
    return None


def no_overlap(analysis: Analysis, trials: Sequence[ChangeTrial]) -> Cause | None:
    """Find gradient communication that does not overlap with computation."""
    facts = analysis.facts[0]
    wanted = overlap_wanted(analysis.facts, analysis.steps)
    trial = tried_change(trials, "buckets")
    if wanted is None or (trial is not None and not confirmed(trial)):
        return None
    computed, hidden = gains.gain_of_overlap(
        analysis.steps, gradient_bytes=facts.gradient_bytes, message_bytes=wanted * 2**20
    )
    exposed_s = transfer_s(analysis.steps)
    messages = gains.messages_of(facts)
    # On a CPU, communication uses the computing cores, so only a trial can tell the gain of
    # overlap.
    gain = computed if facts.device != "cpu" or messages is None else None
    if messages is None:
        how, fix = (
            "by the script, after the backward pass",
            "model = DistributedDataParallel(model)",
        )
    else:
        how = f"in {messages} {'message' if messages == 1 else 'messages'}"
        fix = f"DistributedDataParallel(model, bucket_cap_mb={wanted})"
    return Cause(
        name="no-overlap",
        what=f"{exposed_s / analysis.step_s:.0%} of the step is exposed gradient communication",
        would="sending the gradients during the backward pass would give",
        gain=gain if trial is None else trial.gain,
        known_by="trace" if trial is None else "trial",
        why=f"{format_bytes(facts.gradient_bytes)} of gradients are sent {how}, without overlap; "
        f"in messages of {wanted} MiB, {hidden:.0%} of the transfer would overlap with the "
        "backward pass",
        fix=fix,
        evidence=f"even the last rank waits {amount_text(exposed_s, 's')} of "
        f"{amount_text(analysis.step_s, 's')}; the backward pass itself takes "
        f"{amount_text(mean_s(analysis.steps, 'backward'), 's')}",
        change=None if messages is None else TriedChange(kind="buckets", value=wanted),
    )


def sent_each_micro_batch(analysis: Analysis, _: Sequence[ChangeTrial]) -> Cause | None:
    """Find gradient communication in every micro-batch although only the sum is used."""
    facts, traced = analysis.facts[0], analysis.ranks[0].trace
    micro_batches = max(one.micro_batches for step in analysis.steps for one in step.values())
    messages = gains.messages_of(facts)
    if traced is None or messages is None or micro_batches < 2:
        return None
    if traced.messages < messages * micro_batches:
        return None
    saved_s = transfer_s(analysis.steps) * (1 - 1 / micro_batches)
    gain = gains.gain(analysis.steps, lambda *_: 0.0, transfer_saved_s=saved_s)
    if gain < WORTH_FROM:
        return None
    return Cause(
        name="sent-each-micro-batch",
        what=f"gradients are sent {micro_batches} times per step",
        would="sending their sum once would give",
        gain=gain,
        known_by="trace",
        why="DDP sends gradients in every backward pass by default; only the last pass of a step "
        "needs to",
        fix="with model.no_sync():     around forward and backward of all micro-batches but the last",
        evidence=f"{traced.messages:.0f} collectives per step; {messages} are enough",
    )


_READ_EVERY = 100
_SAVING_AT_MOST = 0.01
_STARVED_ALIKE = 0.5  # minimum ratio of the least to the most waiting rank
_MOST_RANKS = 8
_PHASE_FIXES = {
    "data": "check the data of rank {rank} on {host}: does it use the same storage, number of loader "
    "workers and number of samples as the other ranks?\nmuster bench data     on {host} and on another host",
    "forward": "compare the device and inputs of rank {rank} with the other ranks: are its samples longer, is its "
    "device hot or shared?\n"
    "muster doctor && muster bench matmul     on {host} and on another host",
    "compute": "compare the device and inputs of rank {rank} with the other ranks: are its samples longer, is its "
    "device hot or shared?\n"
    "muster doctor && muster bench matmul     on {host} and on another host",
    "backward": "compare the device and inputs of rank {rank} with the other ranks: does only this rank have hooks or "
    "extra work, is its device hot or shared?\nmuster doctor && muster bench matmul     on {host} and on another host",
}


def starved_loader(analysis: Analysis, trials: Sequence[ChangeTrial]) -> Cause | None:
    """Find ranks that all wait for their data."""
    loader = analysis.facts[0].loader
    waits = [share_s(analysis, rank, "data") for rank in range(len(analysis.ranks))]
    if loader is None or min(waits) < _STARVED_ALIKE * max(waits):
        return None
    part = min(waits) / analysis.step_s
    trial = tried_change(trials, "workers")
    workers = gains.workers_needed(analysis.steps, loader.workers)
    workers = workers if trial is None else trial.change.value
    computed = gains.gain_of_workers(analysis.steps, loader.workers, workers)
    if max(computed, on_device_gain(analysis, "data")) < WORTH_FROM:
        return None
    who = "the training process itself, which cannot compute meanwhile"
    if loader.workers:
        who = f"{loader.workers} {'worker' if loader.workers == 1 else 'workers'}, too slowly"
    cause = Cause(
        name="starved-loader",
        what=f"data loading takes {part:.0%} of the step",
        would=f"{workers} workers would give",
        gain=computed,
        known_by="trace",
        why=f"every rank waits {amount_text(min(waits), 's')} of "
        f"{amount_text(analysis.step_s, 's')} for its next batch; the batch is read by {who}",
        fix=f"DataLoader(..., num_workers={workers}, persistent_workers=True)\n"
        f"or in the settings: data: {{workers: {workers}}}",
        evidence=f"{loader.dataset}, num_workers={loader.workers}, "
        f"{loader.samples_per_batch or 'unknown'} samples a batch",
        change=TriedChange(kind="workers", value=workers),
    )
    if trial is None:
        return cause
    if confirmed(trial):
        # A gain beyond the waiting time comes from other conditions than in the profile.
        gain = min(trial.gain, gains.gain_of_phase(analysis.steps, "data"))
        return dataclasses.replace(cause, gain=gain, known_by="trial", change=trial.change)
    return dataclasses.replace(  # no cores for more workers
        cause,
        would="removing the wait would give",
        gain=gains.gain_of_phase(analysis.steps, "data"),
        fix=f"a trial with {trial.change} gave {trial.gain:.2f}x: no free cores on this host. "
        "Preprocess the "
        "data:\ndecode and resize once, and store the result",
        change=None,
    )


def host_reads(analysis: Analysis, _: Sequence[ChangeTrial]) -> Cause | None:
    """Find values that are read to the host in every step."""
    gain = phase_gain(analysis, "reads", left=1 / _READ_EVERY)
    if gain < WORTH_FROM:
        return None
    reads_s = max(one.shares.reads_s for one in analysis.ranks)
    count = max(one.reads for step in analysis.steps for one in step.values())
    return Cause(
        name="host-reads",
        what=f"reading values to the host takes {reads_s / analysis.step_s:.0%} of the step",
        would=f"reading them every {_READ_EVERY} steps would give",
        gain=gain,
        known_by="trace",
        why="each .item(), .tolist(), .cpu() or .numpy() blocks the host until the value is "
        "computed and "
        "copied, and no new work is launched meanwhile",
        fix=f"if step % {_READ_EVERY} == 0: history.append(loss.item())\n"
        f"in between keep loss.detach(); in the settings: train: {{log_every: {_READ_EVERY}}}",
        evidence=f"{count} reads and {amount_text(reads_s, 's')} in a step of {amount_text(analysis.step_s, 's')}",
        change=TriedChange(kind="reads", value=_READ_EVERY),
    )


def many_saves(analysis: Analysis, _: Sequence[ChangeTrial]) -> Cause | None:
    """Find saves that take too much of the time."""
    saves = sum(max(one.saves for one in step.values()) for step in analysis.steps)
    if not saves:
        return None
    saves_s = max(share_s(analysis, rank, "save") for rank in range(len(analysis.ranks)))
    one_s = saves_s * len(analysis.steps) / saves
    every = len(analysis.steps) / saves
    without_s = max(analysis.step_s - saves_s, 1e-9)
    seldom = math.ceil(one_s / (_SAVING_AT_MOST * without_s))
    times = max(math.ceil(seldom / every), 2)
    gain = gains.gain_of_phase(analysis.steps, "save", left=1 / times)
    if gain < WORTH_FROM:
        return None
    steps = round(every * times)
    return Cause(
        name="many-saves",
        what=f"saving takes {saves_s / analysis.step_s:.0%} of the time",
        would=f"saving every {steps} steps would give",
        gain=gain,
        known_by="trace",
        why=f"a save takes {amount_text(one_s, 's')}, and there is one {_often(every)}; every "
        f"{steps} steps it would take "
        f"{_SAVING_AT_MOST:.0%} of the time",
        fix=f"if step % {steps} == 0: torch.save(...)\n"
        f"with muster train, which saves in the background: checkpoint: {{every: {steps}}}",
        evidence=f"{saves} saves in {len(analysis.steps)} steps of {amount_text(analysis.step_s, 's')}",
        change=TriedChange(kind="saves", value=times),
    )


def _often(every: float) -> str:
    return "in every step" if every <= 1 else f"every {every:.3g} steps"


def straggler(analysis: Analysis, _: Sequence[ChangeTrial]) -> Cause | None:
    """Find a straggler and the phase in which it is slower."""
    slow = analysis.slow
    if slow is None or not slow.matters or slow.phase not in _PHASE_FIXES or slow.gain < WORTH_FROM:
        return None
    facts = next(one for one in analysis.facts if one.rank == slow.rank)
    return Cause(
        name=f"straggler-{slow.phase}",
        what=f"straggler: the other ranks wait for rank {slow.rank}, which is slower in "
        f"{slow.phase}",
        would="running as fast as the others would give",
        gain=slow.gain,
        known_by="trace",
        why=f"it is the last rank at the gradient exchange in {slow.last_in} of {slow.of_steps} "
        "steps, "
        f"{amount_text(slow.late_s, 's')} after the next slowest rank; its {slow.phase} takes "
        f"{amount_text(slow.longer_s, 's')} longer "
        "than the others'. The others wait in the gradient exchange, so their steps take as long",
        fix=_PHASE_FIXES[slow.phase].format(rank=slow.rank, host=facts.host),
        evidence=_by_rank(analysis, slow.phase),
    )


def _by_rank(analysis: Analysis, phase: str) -> str:
    """Return the time of a phase by rank, without waiting for other ranks."""
    lines = []
    for one in analysis.ranks[:_MOST_RANKS]:
        rank = one.facts.rank
        if one.trace is not None and one.trace.on_device:
            mean = one.shares.by_name()[phase]
        else:
            mean = mean_s([{rank: step[rank]} for step in analysis.steps], phase)
        lines.append(f"rank {rank}: {phase} {amount_text(mean, 's')}")
    if len(analysis.ranks) > len(lines):
        lines.append(f"and {len(analysis.ranks) - len(lines)} more ranks")
    return "\n".join(lines)
