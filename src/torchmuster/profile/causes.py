"""Why a training is slow: a rule for each cause, with its test, its gain, its advice and its change."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import amount_text
from torchmuster.profile.analysis import SHARES, Profile
from torchmuster.profile.facts import Change
from torchmuster.units import format_bytes, plural

BATCH_TIMES = 8
WORTH_FROM = 1.1  # smaller gains are not reported
# A change of the results needs a larger measured gain, and comes later in the list.
CHANGES_RESULTS = {"bf16": 1.15, "batch": 1.5}
_WEIGHT_OF_OTHER_RESULTS = 0.4
_READ_EVERY = 100
_SAVING_AT_MOST = 0.01  # of the time
_STARVED_ALIKE = 0.5  # minimum ratio of the least to the most waiting rank
_MOST_RANKS = 8  # listed in the evidence
_COMPUTING_FROM = 0.5  # of the step: then the precision may matter
_FIXED_FROM = 0.25  # of the step: then the batch may be too small
_MESSAGES = 6  # per backward, so that they overlap
_FEW_MESSAGES = 2
_SMALLEST_MESSAGE_MIB = 1
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

    Gains are factors in samples/s. ``gain`` is computed from the step times, and ``would`` is the
    text before it; None: only a trial can tell. ``change`` is what ``--verify`` can try; None: only
    by hand. ``tried`` is the gain that it measured.
    """

    name: str
    what: str
    would: str = ""
    gain: float | None = None
    why: str
    fix: str
    evidence: str
    change: Change | None = None
    is_certain: bool = False  # also without a gain
    tried: float | None = None

    @property
    def is_accused(self) -> bool:
        """Whether it is a cause, and not only a change that may help."""
        if self.tried is None:
            return self.is_certain or self.gain is not None
        kind = "" if self.change is None else self.change.kind
        return self.tried >= CHANGES_RESULTS.get(kind, WORTH_FROM)

    @property
    def weight(self) -> float:
        """How far up in the list it belongs."""
        if not self.is_accused:
            return 0.0
        gain = self.tried or self.gain
        if gain is None:
            return math.inf
        if self.change is not None and self.change.kind in CHANGES_RESULTS:
            return (gain - 1) * _WEIGHT_OF_OTHER_RESULTS
        return gain - 1

    @property
    def finding(self) -> Finding:
        """The cause as it is shown."""
        gain, source = "gain unknown; try it: muster profile --verify", ""
        if self.gain is not None:
            gain = f"{self.would} {self.gain:.1f}x"
            source = "\ngain computed from the step times"
        if self.tried is not None:
            gain = f"{self.change} gave {self.tried:.2f}x"
            source = "\ngain measured on this training"
        return Finding(
            name=self.name,
            status=Status.WARNING if self.is_accused else Status.NOTE,
            what=f"{self.what}: {gain}",
            why=self.why,
            fix=self.fix,
            evidence=f"{self.evidence}{source}",
        )


def find_causes(profile: Profile) -> list[Cause]:
    """Return the causes and the changes that may help, best advice first."""
    if not profile.steps:
        return []
    causes = []
    for rule in _RULES:
        cause = rule(profile)
        if cause is not None:
            causes.append(cause)
    return in_order(causes)


def with_trials(causes: Sequence[Cause], gains: Mapping[Change, float]) -> list[Cause]:
    """Return the causes with what ``--verify`` measured; a change that gains too little is a note."""
    tried = []
    for cause in causes:
        gain = None if cause.change is None else gains.get(cause.change)
        if gain is not None and cause.gain is not None:
            # More comes from other conditions than in the profile, such as batches read beforehand.
            gain = min(gain, cause.gain)
        tried.append(replace(cause, tried=gain))
    return in_order(tried)


def in_order(causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes, the best advice first."""
    return sorted(causes, key=lambda cause: cause.weight, reverse=True)


def findings_of(profile: Profile, causes: Sequence[Cause]) -> list[Finding]:
    """Return the causes as findings; first what limits the training, if none is certain."""
    findings = [cause.finding for cause in causes]
    if any(cause.is_accused for cause in causes):
        return findings
    limit = Finding(
        name="nothing-to-fix",
        status=Status.OK,
        what=f"nothing to fix: {_largest_share(profile)}",
        why="no part of the step is both large and avoidable",
        evidence=f"a step takes {amount_text(profile.step_s, 's')}",
    )
    return [limit, *findings]


def _largest_share(profile: Profile) -> str:
    """Return the largest share of the first rank's step."""
    shares = {name: profile.part(0, name) for name in SHARES}
    largest = max(shares, key=lambda name: shares[name])
    return f"{shares[largest]:.0%} of the step is {SHARES[largest]}"


def _of_step(profile: Profile, seconds: float) -> str:
    return f"{amount_text(seconds, 's')} of {amount_text(profile.step_s, 's')}"


# ---- the rules


def _too_many_threads(profile: Profile) -> Cause | None:
    """Ranks have more threads than cores."""
    facts = profile.facts[0]
    fitting = max(facts.cores // facts.ranks_here, 1)
    if facts.device != "cpu" or facts.threads <= fitting:
        return None
    return Cause(
        name="too-many-threads",
        what=f"{facts.ranks_here} ranks with {facts.threads} threads each share {facts.cores} cores",
        is_certain=True,
        why="with more threads than cores, threads wait for each other after every operation",
        fix=f"torch.set_num_threads({fitting})     or for all ranks: OMP_NUM_THREADS={fitting}",
        evidence=f"torch.get_num_threads() is {facts.threads} on each of {facts.ranks_here} ranks",
        change=Change(kind="threads", value=fitting),
    )


def _starved_loader(profile: Profile) -> Cause | None:
    """All ranks wait for their data."""
    loader = profile.facts[0].loader
    waits = [shares["data"] for shares in profile.shares]
    gain = profile.gain_of_phase("data")
    if loader is None or min(waits) < _STARVED_ALIKE * max(waits) or gain < WORTH_FROM:
        return None
    workers = profile.workers_needed(loader.workers)
    reader = "the training process itself, which cannot compute meanwhile"
    if loader.workers:
        reader = f"{plural(loader.workers, 'worker')}, too slowly"
    return Cause(
        name="starved-loader",
        what=f"data loading takes {min(waits) / profile.step_s:.0%} of the step",
        would=f"{workers} workers would give at most",
        gain=gain,
        why=f"every rank waits {_of_step(profile, min(waits))} for its next batch; the batch is read "
        f"by {reader}",
        fix=f"DataLoader(..., num_workers={workers}, persistent_workers=True)\n"
        f"or in the settings: data: {{workers: {workers}}}\n"
        "without free cores: decode and resize the data once, and store the result",
        evidence=f"{loader.dataset}, num_workers={loader.workers}, "
        f"{loader.samples_per_batch or 'unknown'} samples a batch",
        change=Change(kind="workers", value=workers),
    )


def _host_reads(profile: Profile) -> Cause | None:
    """Values are read to the host in every step.

    There is no trial: a read cannot be left out without giving the script a wrong value.
    """
    gain = profile.gain_of_phase("reads", left=1 / _READ_EVERY)
    if gain < WORTH_FROM:
        return None
    reads_s = max(shares["reads"] for shares in profile.shares)
    return Cause(
        name="host-reads",
        what=f"reading values to the host takes {reads_s / profile.step_s:.0%} of the step",
        would=f"reading them every {_READ_EVERY} steps would give",
        gain=gain,
        why="each .item(), .tolist(), .cpu() or .numpy() blocks the host until the value is computed "
        "and copied, and no new work is launched meanwhile",
        fix=f"if step % {_READ_EVERY} == 0: history.append(loss.item())\n"
        f"in between keep loss.detach(); in the settings: train: {{log_every: {_READ_EVERY}}}",
        evidence=f"{profile.most_times('reads')} reads: {_of_step(profile, reads_s)}",
    )


def _many_saves(profile: Profile) -> Cause | None:
    """Saves take too much of the time."""
    saves = 0
    for step in profile.steps:
        saves += max(own.times.get("save", 0) for own in step.values())
    if not saves:
        return None
    saves_s = max(shares["save"] for shares in profile.shares)
    save_s = saves_s * len(profile.steps) / saves
    every = len(profile.steps) / saves
    without_s = max(profile.step_s - saves_s, 1e-9)
    times = max(math.ceil(save_s / (_SAVING_AT_MOST * without_s) / every), 2)
    gain = profile.gain(lambda own: own.own_s("save") * (1 - 1 / times))
    if gain < WORTH_FROM:
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


def _straggler(profile: Profile) -> Cause | None:
    """One rank is last, in one phase."""
    slow = profile.straggler
    if slow is None or slow.gain < WORTH_FROM or slow.phase not in _STRAGGLER_FIXES:
        return None
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
        fix=_STRAGGLER_FIXES[slow.phase].format(rank=slow.rank, host=profile.facts[slow.rank].host),
        evidence="\n".join(lines),
    )


def _no_overlap(profile: Profile) -> Cause | None:
    """Gradient communication does not overlap with computation."""
    facts, messages = profile.facts[0], profile.messages
    if len(profile.facts) < 2 or not facts.gradient_bytes or facts.strategy == "fsdp":
        return None
    if messages is not None and messages > _FEW_MESSAGES:
        return None
    # What is sent in six messages can overlap but for the last one, if the backward is that long.
    hidden_s = min(profile.transfer_s, profile.mean_s("backward")) * (1 - 1 / _MESSAGES)
    gain: float | None = profile.gain(transfer_saved_s=hidden_s)
    if hidden_s < profile.transfer_s / 2 or gain is None or gain < WORTH_FROM:
        return None  # the network is the limit, or there is little to gain
    size_mib = max(round(facts.gradient_bytes / _MESSAGES / 2**20), _SMALLEST_MESSAGE_MIB)
    fix, how = "model = DistributedDataParallel(model)", "by the script, after the backward pass"
    if messages is not None:
        fix = f"DistributedDataParallel(model, bucket_cap_mb={size_mib})"
        how = f"in {plural(messages, 'message')}"
    if facts.device == "cpu" and messages is not None:
        gain = None  # communication uses the cores that compute, so only a trial can tell
    return Cause(
        name="no-overlap",
        what=f"{profile.transfer_s / profile.step_s:.0%} of the step is exposed gradient communication",
        would="sending the gradients during the backward pass would give at most",
        gain=gain,
        why=f"{format_bytes(facts.gradient_bytes)} of gradients are sent {how}, without overlap",
        fix=fix,
        evidence=f"even the last rank waits {_of_step(profile, profile.transfer_s)}; the backward pass "
        f"itself takes {amount_text(profile.mean_s('backward'), 's')}",
        change=None if messages is None else Change(kind="buckets", value=size_mib),
    )


def _sent_each_micro_batch(profile: Profile) -> Cause | None:
    """Gradients are sent in every micro-batch although only the sum is used."""
    trace, messages = profile.facts[0].trace, profile.messages
    micro_batches = profile.most_times("backward")
    if trace is None or messages is None or micro_batches < 2:
        return None
    gain = profile.gain(transfer_saved_s=profile.transfer_s * (1 - 1 / micro_batches))
    if trace.messages < messages * micro_batches or gain < WORTH_FROM:
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


def _full_precision(profile: Profile) -> Cause | None:
    """All computation is in fp32, where bf16 may be faster."""
    facts = profile.facts[0]
    passes_s = profile.mean_s("forward") + profile.mean_s("backward")
    is_float32 = facts.autocast is None and set(facts.parameter_dtypes) == {"float32"}
    if not is_float32 or passes_s < _COMPUTING_FROM * profile.step_s:
        return None
    return Cause(
        name="full-precision",
        what="all computation is in fp32",
        why="weights stay in fp32; only matrix products are computed in 16 bits, which is faster on "
        "most devices",
        fix=f'with torch.autocast("{facts.device.partition(":")[0]}", dtype=torch.bfloat16):\n'
        "or in the settings: train: {precision: bf16}. Compare the losses of both precisions: "
        "muster bench precision",
        evidence=f"forward and backward take {_of_step(profile, passes_s)}",
        change=Change(kind="bf16"),
    )


def _tiny_batch(profile: Profile) -> Cause | None:
    """Steps may have too few samples for their fixed cost."""
    fixed_s = profile.transfer_s + profile.mean_s("optimizer")
    idle = max(profile.part(facts.rank, "idle") for facts in profile.facts)
    if fixed_s >= _FIXED_FROM * profile.step_s:
        evidence = f"communication and the optimizer take {_of_step(profile, fixed_s)}"
    elif idle >= _FIXED_FROM:
        evidence = f"a rank idles, or runs other code, for {idle:.0%} of the step"
    else:
        return None
    loader = profile.facts[0].loader
    size = "N"
    if loader is not None and loader.samples_per_batch is not None:
        size = str(BATCH_TIMES * loader.samples_per_batch)
    return Cause(
        name="tiny-batch",
        what="the batch may be too small for the fixed cost of a step",
        why="gradient communication, the optimizer and operation launches cost the same for one sample "
        "as for many",
        fix=f"batch_size={size} with an adapted learning rate; or the same batch on fewer ranks\n"
        "what fits: muster plan --find-batch-size; fewer, larger kernels: torch.compile(model)",
        evidence=evidence,
        change=Change(kind="batch", value=BATCH_TIMES),
    )


_RULES: tuple[Callable[[Profile], Cause | None], ...] = (
    _too_many_threads,
    _starved_loader,
    _no_overlap,
    _full_precision,
    _tiny_batch,
    _host_reads,
    _many_saves,
    _straggler,
    _sent_each_micro_batch,
)
