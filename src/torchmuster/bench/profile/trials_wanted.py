"""Choose the changes to try: those whose gain depends on the host and cannot be computed."""

from collections.abc import Iterator, Sequence

from torchmuster.bench.profile.changes import TriedChange
from torchmuster.bench.profile.gains import (
    RanksStep,
    gain_of_overlap,
    mean_s,
    message_mib,
    messages_of,
    transfer_s,
    usual_step_s,
    workers_needed,
)
from torchmuster.bench.profile.recording import RankFacts

BATCH_TIMES = 8
_FIXED_FROM = 0.25
_PASSES_FROM = 0.5
_DATA_FROM = 0.1
_OVERLAP_FROM = 1.1
_HIDDEN_FROM = 0.5  # of the transfer; otherwise the network is the limit
_FEW_MESSAGES = 2


def trials_wanted(
    ranks: Sequence[RankFacts], steps: Sequence[RanksStep], *, small_operations: bool
) -> tuple[TriedChange, ...]:
    """Return the changes to try, the most promising first."""
    return tuple(_wanted(ranks, steps, small_operations)) if steps else ()


def _wanted(
    ranks: Sequence[RankFacts], steps: Sequence[RanksStep], small_operations: bool
) -> Iterator[TriedChange]:
    whole_s, first = usual_step_s(steps), ranks[0]
    if (fewer := fitting_threads(first)) is not None:
        yield TriedChange(kind="threads", value=fewer)
    loader = first.loader
    if loader is not None and mean_s(steps, "data") >= _DATA_FROM * whole_s:
        yield TriedChange(kind="workers", value=workers_needed(steps, loader.workers))
    buckets = overlap_wanted(ranks, steps)
    if buckets is not None and first.spread == "ddp" and first.device == "cpu":
        yield TriedChange(kind="buckets", value=buckets)
    passes_s = mean_s(steps, "forward") + mean_s(steps, "backward")
    if in_full_precision(first) and passes_s >= _PASSES_FROM * whole_s:
        yield TriedChange(kind="bf16")
    fixed_s = transfer_s(steps) + mean_s(steps, "optimizer")
    if small_operations or fixed_s >= _FIXED_FROM * whole_s:
        yield TriedChange(kind="batch", value=BATCH_TIMES)


def fitting_threads(facts: RankFacts) -> int | None:
    """Return a rank's share of the cores if it uses more threads; else None."""
    if facts.device != "cpu":
        return None
    fitting = max(facts.cores // facts.ranks_here, 1)
    return fitting if facts.threads > fitting else None


def overlap_wanted(ranks: Sequence[RankFacts], steps: Sequence[RanksStep]) -> int | None:
    """Return the message size in MiB that overlaps most of the transfer; None if there is none."""
    facts = ranks[0]
    messages = messages_of(facts)
    if len(ranks) < 2 or not facts.gradient_bytes or facts.spread == "fsdp":
        return None
    if messages is not None and messages > _FEW_MESSAGES:
        return None
    wanted = message_mib(facts.gradient_bytes)
    gain, hidden = gain_of_overlap(
        steps, gradient_bytes=facts.gradient_bytes, message_bytes=wanted * 2**20
    )
    return wanted if gain >= _OVERLAP_FROM and hidden >= _HIDDEN_FROM else None


def in_full_precision(facts: RankFacts) -> bool:
    """Return whether all computation is in fp32."""
    return facts.autocast is None and set(facts.parameter_dtypes) == {"float32"}
