"""Why a training is slow: one table of causes, each with its test, its gain, its advice and its trial."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import amount_text
from torchmuster.profile.analysis import SHARES, Profile
from torchmuster.profile.facts import Change, Kind, Trial
from torchmuster.units import format_bytes, plural

BATCH_TIMES = 8
_WORTH_FROM = 1.1  # smaller gains are not reported
_ANOTHER_PRECISION_FROM = 1.15
_ANOTHER_BATCH_FROM = 1.5
# A change of the results needs a larger gain to come first.
_WEIGHT_OF_OTHER_RESULTS = 0.4
_OTHER_RESULTS: tuple[Kind, ...] = ("bf16", "batch")
_READ_EVERY = 100
_SAVING_AT_MOST = 0.01  # of the time
_STARVED_ALIKE = 0.5  # minimum ratio of the least to the most waiting rank
_MOST_RANKS = 8  # listed in the evidence
_DATA_TRIAL_FROM = 0.1  # of the step
_PRECISION_TRIAL_FROM = 0.5
_BATCH_TRIAL_FROM = 0.25
_MESSAGES = 6  # per backward, so that they overlap
_FEW_MESSAGES = 2
_SMALLEST_MESSAGE_MIB = 1
_HIDDEN_FROM = 0.5  # of the transfer; otherwise the network is the limit
_COMPARE_RANKS = (
    "compare the device and inputs of rank {rank} with the other ranks: {what}, is its device hot or "
    "shared?\nmuster doctor && muster bench matmul     on {host} and on another host"
)
_STRAGGLER_FIXES = {
    "data": "check the data of rank {rank} on {host}: does it use the same storage, number of loader "
    "workers and number of samples as the other ranks?\nmuster bench data     on {host} and on "
    "another host",
    "forward": _COMPARE_RANKS.replace("{what}", "are its samples longer"),
    "compute": _COMPARE_RANKS.replace("{what}", "are its samples longer"),
    "backward": _COMPARE_RANKS.replace("{what}", "does only this rank have hooks or extra work"),
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reason why a step takes as long as it does, and what to do.

    ``gain`` is the expected factor in samples/s; None: unknown. ``would`` is the text before it.
    ``change`` is what ``--verify`` can apply; None: only by hand.
    """

    name: str
    what: str
    would: str
    gain: float | None
    why: str
    fix: str
    evidence: str
    known_by: Literal["trace", "trial"] = "trace"
    change: Change | None = None

    @property
    def weight(self) -> float:
        """How far up in the list it belongs."""
        if self.gain is None:
            return 0.0
        changes_results = self.change is not None and self.change.kind in _OTHER_RESULTS
        return (self.gain - 1) * (_WEIGHT_OF_OTHER_RESULTS if changes_results else 1.0)

    @property
    def finding(self) -> Finding:
        """The cause as it is shown."""
        if self.gain is None:
            status, gain, source = Status.NOTE, "gain unknown until tried", ""
        else:
            status, gain = Status.WARNING, f"{self.would} {self.gain:.1f}x"
            source = "\ngain computed from the step times"
            if self.known_by == "trial":
                source = "\ngain measured on this training"
        return Finding(
            name=self.name,
            status=status,
            what=f"{self.what}: {gain}",
            why=self.why,
            fix=self.fix,
            evidence=f"{self.evidence}{source}",
        )


def _confirmed(trial: Trial, least: float = _WORTH_FROM) -> bool:
    """Return whether a trial shows a large enough gain in every run with the change."""
    return trial.gain >= least and trial.low > 1.0


def _of_step(profile: Profile, seconds: float) -> str:
    return f"{amount_text(seconds, 's')} of {amount_text(profile.step_s, 's')}"


def _more_workers(profile: Profile) -> Change | None:
    loader = profile.facts[0].loader
    if loader is None or profile.mean_s("data") < _DATA_TRIAL_FROM * profile.step_s:
        return None
    return Change(kind="workers", value=profile.workers_needed(loader.workers))


def _starved_loader(profile: Profile, trial: Trial | None) -> Cause | None:
    """All ranks wait for their data."""
    loader = profile.facts[0].loader
    waits = [shares["data"] for shares in profile.shares]
    if loader is None or min(waits) < _STARVED_ALIKE * max(waits):
        return None
    workers = profile.workers_needed(loader.workers)
    if trial is not None:
        workers = trial.change.value
    gain = profile.gain_of_workers(loader.workers, workers)
    if profile.on_device:
        gain = max(gain, profile.gain_of_phase("data"))
    if gain < _WORTH_FROM:
        return None
    reader = "the training process itself, which cannot compute meanwhile"
    if loader.workers:
        reader = f"{plural(loader.workers, 'worker')}, too slowly"
    cause = Cause(
        name="starved-loader",
        what=f"data loading takes {min(waits) / profile.step_s:.0%} of the step",
        would=f"{workers} workers would give",
        gain=gain,
        why=f"every rank waits {_of_step(profile, min(waits))} for its next batch; the batch is read "
        f"by {reader}",
        fix=f"DataLoader(..., num_workers={workers}, persistent_workers=True)\n"
        f"or in the settings: data: {{workers: {workers}}}",
        evidence=f"{loader.dataset}, num_workers={loader.workers}, "
        f"{loader.samples_per_batch or 'unknown'} samples a batch",
        change=Change(kind="workers", value=workers),
    )
    if trial is None:
        return cause
    without_wait = profile.gain_of_phase("data")
    if _confirmed(trial):
        # A gain beyond the waiting time comes from other conditions than in the profile.
        return replace(cause, gain=min(trial.gain, without_wait), known_by="trial")
    return replace(  # no cores for more workers
        cause,
        would="removing the wait would give",
        gain=without_wait,
        fix=f"a trial with {trial.change} gave {trial.gain:.2f}x: no free cores on this host. "
        "Preprocess the data:\ndecode and resize once, and store the result",
        change=None,
    )


def _host_reads(profile: Profile, _: Trial | None) -> Cause | None:
    """Values are read to the host in every step.

    There is no trial: a read cannot be left out without giving the script a wrong value.
    """
    gain = profile.gain_of_phase("reads", left=1 / _READ_EVERY)
    if gain < _WORTH_FROM:
        return None
    reads_s = max(shares["reads"] for shares in profile.shares)
    count = max(own.reads for step in profile.steps for own in step.values())
    return Cause(
        name="host-reads",
        what=f"reading values to the host takes {reads_s / profile.step_s:.0%} of the step",
        would=f"reading them every {_READ_EVERY} steps would give",
        gain=gain,
        why="each .item(), .tolist(), .cpu() or .numpy() blocks the host until the value is computed "
        "and copied, and no new work is launched meanwhile",
        fix=f"if step % {_READ_EVERY} == 0: history.append(loss.item())\n"
        f"in between keep loss.detach(); in the settings: train: {{log_every: {_READ_EVERY}}}",
        evidence=f"{count} reads: {_of_step(profile, reads_s)}",
    )


def _many_saves(profile: Profile, _: Trial | None) -> Cause | None:
    """Saves take too much of the time."""
    saves = sum(max(own.saves for own in step.values()) for step in profile.steps)
    if not saves:
        return None
    saves_s = max(shares["save"] for shares in profile.shares)
    save_s = saves_s * len(profile.steps) / saves
    every = len(profile.steps) / saves
    without_s = max(profile.step_s - saves_s, 1e-9)
    times = max(math.ceil(save_s / (_SAVING_AT_MOST * without_s) / every), 2)
    gain = profile.gain(lambda own: own.save_s * (1 - 1 / times))
    if gain < _WORTH_FROM:
        return None
    steps = round(every * times)
    often = "in every step" if every <= 1 else f"every {every:.3g} steps"
    return Cause(
        name="many-saves",
        what=f"saving takes {saves_s / profile.step_s:.0%} of the time",
        would=f"saving every {steps} steps would give",
        gain=gain,
        why=f"a save takes {amount_text(save_s, 's')}, and there is one {often}; every {steps} steps it "
        f"would take {_SAVING_AT_MOST:.0%} of the time",
        fix=f"if step % {steps} == 0: torch.save(...)\n"
        f"with muster train, which saves in the background: checkpoint: {{every: {steps}}}",
        evidence=f"{saves} saves in {len(profile.steps)} steps of {amount_text(profile.step_s, 's')}",
        change=Change(kind="saves", value=times),
    )


def _straggler(profile: Profile, _: Trial | None) -> Cause | None:
    """One rank is last, in one phase."""
    slow = profile.straggler
    if slow is None or slow.gain < _WORTH_FROM or slow.phase not in _STRAGGLER_FIXES:
        return None
    host = next(facts.host for facts in profile.facts if facts.rank == slow.rank)
    lines = []
    for facts in profile.facts[:_MOST_RANKS]:
        seconds = profile.phase_s(facts.rank, slow.phase)
        lines.append(f"rank {facts.rank}: {slow.phase} {amount_text(seconds, 's')}")
    if len(profile.facts) > _MOST_RANKS:
        lines.append(f"and {len(profile.facts) - _MOST_RANKS} more ranks")
    return Cause(
        name=f"straggler-{slow.phase}",
        what=f"straggler: the other ranks wait for rank {slow.rank}, which is slower in {slow.phase}",
        would="running as fast as the others would give",
        gain=slow.gain,
        why=f"it is the last rank at the gradient exchange in {slow.last_in} of {slow.of_steps} steps, "
        f"{amount_text(slow.late_s, 's')} after the next slowest rank; its {slow.phase} takes "
        f"{amount_text(slow.longer_s, 's')} longer than the others'",
        fix=_STRAGGLER_FIXES[slow.phase].format(rank=slow.rank, host=host),
        evidence="\n".join(lines),
    )


def _message_mib(profile: Profile) -> int | None:
    """Return the message size that overlaps most of the transfer; None if there is none."""
    facts = profile.facts[0]
    if len(profile.facts) < 2 or not facts.gradient_bytes or facts.strategy == "fsdp":
        return None
    if profile.messages is not None and profile.messages > _FEW_MESSAGES:
        return None
    size_mib = max(round(facts.gradient_bytes / _MESSAGES / 2**20), _SMALLEST_MESSAGE_MIB)
    hidden_s = profile.hidden_transfer_s(size_mib * 2**20)
    if hidden_s < _HIDDEN_FROM * profile.transfer_s:
        return None
    return size_mib if profile.gain(transfer_saved_s=hidden_s) >= _WORTH_FROM else None


def _smaller_buckets(profile: Profile) -> Change | None:
    # On a CPU, communication uses the computing cores, so only a trial can tell the gain.
    facts, size_mib = profile.facts[0], _message_mib(profile)
    if size_mib is None or facts.strategy != "ddp" or facts.device != "cpu":
        return None
    return Change(kind="buckets", value=size_mib)


def _no_overlap(profile: Profile, trial: Trial | None) -> Cause | None:
    """Gradient communication does not overlap with computation."""
    size_mib, messages = _message_mib(profile), profile.messages
    if size_mib is None or (trial is not None and not _confirmed(trial)):
        return None
    hidden_s = profile.hidden_transfer_s(size_mib * 2**20)
    gain: float | None = profile.gain(transfer_saved_s=hidden_s)
    if trial is not None:
        gain = trial.gain
    elif _smaller_buckets(profile) is not None:
        gain = None
    fix, how = "model = DistributedDataParallel(model)", "by the script, after the backward pass"
    if messages is not None:
        fix = f"DistributedDataParallel(model, bucket_cap_mb={size_mib})"
        how = f"in {plural(messages, 'message')}"
    return Cause(
        name="no-overlap",
        what=f"{profile.transfer_s / profile.step_s:.0%} of the step is exposed gradient communication",
        would="sending the gradients during the backward pass would give",
        gain=gain,
        known_by="trace" if trial is None else "trial",
        why=f"{format_bytes(profile.facts[0].gradient_bytes)} of gradients are sent {how}, without "
        f"overlap; in messages of {size_mib} MiB, {hidden_s / profile.transfer_s:.0%} of the transfer "
        "would overlap with the backward pass",
        fix=fix,
        evidence=f"even the last rank waits {_of_step(profile, profile.transfer_s)}; the backward pass "
        f"itself takes {amount_text(profile.mean_s('backward'), 's')}",
        change=None if messages is None else Change(kind="buckets", value=size_mib),
    )


def _sent_each_micro_batch(profile: Profile, _: Trial | None) -> Cause | None:
    """Gradients are sent in every micro-batch although only the sum is used."""
    trace, messages = profile.facts[0].trace, profile.messages
    micro_batches = max(own.micro_batches for step in profile.steps for own in step.values())
    if trace is None or messages is None or micro_batches < 2:
        return None
    gain = profile.gain(transfer_saved_s=profile.transfer_s * (1 - 1 / micro_batches))
    if trace.messages < messages * micro_batches or gain < _WORTH_FROM:
        return None
    return Cause(
        name="sent-each-micro-batch",
        what=f"gradients are sent {micro_batches} times per step",
        would="sending their sum once would give",
        gain=gain,
        why="DDP sends gradients in every backward pass by default; only the last pass of a step needs "
        "to",
        fix="with model.no_sync():     around forward and backward of all micro-batches but the last",
        evidence=f"{trace.messages:.0f} collectives per step; {messages} are enough",
    )


def _fewer_threads(profile: Profile) -> Change | None:
    facts = profile.facts[0]
    fitting = max(facts.cores // facts.ranks_here, 1)
    if facts.device != "cpu" or facts.threads <= fitting:
        return None
    return Change(kind="threads", value=fitting)


def _too_many_threads(profile: Profile, trial: Trial | None) -> Cause | None:
    """Ranks have more threads than cores."""
    facts, change = profile.facts[0], _fewer_threads(profile)
    if change is None or (trial is not None and not _confirmed(trial)):
        return None
    return Cause(
        name="too-many-threads",
        what=f"{facts.ranks_here} ranks with {facts.threads} threads each share {facts.cores} cores",
        would=f"{plural(change.value, 'thread')} each would give",
        gain=None if trial is None else trial.gain,
        known_by="trial",
        why="with more threads than cores, threads wait for each other after every operation",
        fix=f"torch.set_num_threads({change.value})     or for all ranks: "
        f"OMP_NUM_THREADS={change.value}",
        evidence=f"torch.get_num_threads() is {facts.threads} on each of {facts.ranks_here} ranks",
        change=change,
    )


def _in_full_precision(profile: Profile) -> bool:
    facts = profile.facts[0]
    return facts.autocast is None and set(facts.parameter_dtypes) == {"float32"}


def _passes_s(profile: Profile) -> float:
    return profile.mean_s("forward") + profile.mean_s("backward")


def _reduced_precision(profile: Profile) -> Change | None:
    if _passes_s(profile) < _PRECISION_TRIAL_FROM * profile.step_s:
        return None
    return Change(kind="bf16") if _in_full_precision(profile) else None


def _full_precision(profile: Profile, trial: Trial | None) -> Cause | None:
    """All computation is in fp32 although bf16 is faster."""
    device = profile.facts[0].device.partition(":")[0]
    if trial is not None and not _confirmed(trial, _ANOTHER_PRECISION_FROM):
        return None
    if not _in_full_precision(profile) or (trial is None and device == "cpu"):
        return None
    return Cause(
        name="full-precision",
        what="all computation is in fp32",
        would="bf16 would give",
        gain=None if trial is None else trial.gain,
        known_by="trial",
        why="weights stay in fp32; only matrix products are computed in 16 bits, which is faster on "
        f"{'most devices' if trial is None else 'this device'}",
        fix=f'with torch.autocast("{device}", dtype=torch.bfloat16):\n'
        "or in the settings: train: {precision: bf16}. Compare the losses of both precisions: "
        "muster bench precision",
        evidence=f"forward and backward take {_of_step(profile, _passes_s(profile))}",
        change=Change(kind="bf16"),
    )


def _larger_batch(profile: Profile) -> Change | None:
    fixed_s = profile.transfer_s + profile.mean_s("optimizer")
    if not profile.launch_bound and fixed_s < _BATCH_TRIAL_FROM * profile.step_s:
        return None
    return Change(kind="batch", value=BATCH_TIMES)


def _tiny_batch(profile: Profile, trial: Trial | None) -> Cause | None:
    """Steps have too few samples for the fixed cost of a step."""
    gain = profile.gain_of_batch(BATCH_TIMES) if trial is None else trial.gain
    if gain < _ANOTHER_BATCH_FROM or (trial is not None and not _confirmed(trial)):
        return _idling_device(profile) if trial is None else None
    times = BATCH_TIMES if trial is None else trial.change.value
    loader = profile.facts[0].loader
    batch, larger, size = "the batch", f"{times} times as many", "N"
    if loader is not None and loader.samples_per_batch is not None:
        batch = f"a batch of {loader.samples_per_batch} samples"
        size = str(times * loader.samples_per_batch)
        larger = f"{size} samples"
    fixed_s = profile.transfer_s + profile.mean_s("optimizer")
    return Cause(
        name="tiny-batch",
        what=f"{batch} is too small for the fixed cost of a step",
        would=f"{larger} would give{' at least' if trial is None else ''}",
        gain=gain,
        known_by="trace" if trial is None else "trial",
        why="gradient communication, the optimizer and operation launches cost the same for one sample "
        "as for many",
        fix=f"batch_size={size} with an adapted learning rate; or the same batch on fewer ranks\n"
        "what fits: muster plan --find-batch-size",
        evidence=f"communication and the optimizer take {_of_step(profile, fixed_s)}",
        change=Change(kind="batch", value=times),
    )


def _idling_device(profile: Profile) -> Cause | None:
    """A device idles between kernel launches; only a trial can tell the gain."""
    for place, facts in enumerate(profile.facts):
        trace = facts.trace
        if not facts.on_device or trace is None or not trace.launch_bound:
            continue
        return Cause(
            name="tiny-batch",
            what=f"rank {facts.rank}'s device idles {profile.part(place, 'idle'):.0%} of the step "
            "between small kernels",
            would="",
            gain=None,
            known_by="trial",
            why="a kernel finishes before the host has launched the next one: fewer, larger kernels "
            "would keep the device busy",
            fix="a larger batch, or model = torch.compile(model)\nwithout --no-trials, muster "
            f"profile tries {BATCH_TIMES} times the batch",
            evidence=f"{trace.calls:,.0f} kernels per step, the median takes "
            f"{amount_text(trace.median_s, 's')}",
            change=Change(kind="batch", value=BATCH_TIMES),
        )
    return None


@dataclass(frozen=True)
class _Rule:
    """A row of the table: the test, and the change whose gain only a trial can tell."""

    find: Callable[[Profile, Trial | None], Cause | None]
    kind: Kind | None = None
    try_change: Callable[[Profile], Change | None] = lambda _: None


_RULES = (
    _Rule(_too_many_threads, "threads", _fewer_threads),
    _Rule(_starved_loader, "workers", _more_workers),
    _Rule(_no_overlap, "buckets", _smaller_buckets),
    _Rule(_full_precision, "bf16", _reduced_precision),
    _Rule(_tiny_batch, "batch", _larger_batch),
    _Rule(_host_reads),
    _Rule(_many_saves),
    _Rule(_straggler),
    _Rule(_sent_each_micro_batch),
)


def changes_to_try(profile: Profile) -> list[Change]:
    """Return the changes whose gain cannot be computed, the most promising first."""
    if not profile.steps:
        return []
    changes = [rule.try_change(profile) for rule in _RULES]
    return [change for change in changes if change is not None]


def find_causes(profile: Profile, trials: Sequence[Trial] = ()) -> list[Cause]:
    """Return the causes, best advice first; empty if nothing gains enough."""
    if not profile.steps:
        return []
    by_kind: Mapping[Kind, Trial] = {trial.change.kind: trial for trial in trials}
    causes = []
    for rule in _RULES:
        cause = rule.find(profile, by_kind.get(rule.kind) if rule.kind else None)
        if cause is not None:
            causes.append(cause)
    return sorted(causes, key=lambda cause: cause.weight, reverse=True)


def nothing_to_fix(profile: Profile, trials: Sequence[Trial] = ()) -> Finding:
    """Return what limits a training run for which there is no advice."""
    tried = [f"tried: {trial.change}: {trial.gain:.2f}x" for trial in trials]
    return Finding(
        name="nothing-to-fix",
        status=Status.OK,
        what=f"nothing to fix: {_largest_share(profile)}",
        why="no part of the step is both large and avoidable",
        evidence="\n".join([f"a step takes {amount_text(profile.step_s, 's')}", *tried]),
    )


def _largest_share(profile: Profile) -> str:
    """Return the largest share of the step over all ranks, and its most expensive operation."""
    parts = dict.fromkeys(SHARES, 0.0)
    for place in range(len(profile.facts)):
        for name in parts:
            parts[name] += profile.part(place, name) / len(profile.facts)
    parts["compute"] += parts.pop("overlapped")
    largest = max(parts, key=lambda name: parts[name])
    text = f"{parts[largest]:.0%} of the step is {SHARES[largest]}"
    trace = profile.facts[0].trace
    if largest == "compute" and trace is not None and trace.top:
        text += f", most of it {trace.top[0].name}"
    return text
