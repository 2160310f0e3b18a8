"""Computing that could be faster: too many threads, more bits than needed, too few samples at a time."""

from collections.abc import Sequence

from torchmuster.bench.profile import gains
from torchmuster.bench.profile.analysis import Analysis
from torchmuster.bench.profile.cause import Cause, confirmed, tried
from torchmuster.bench.profile.changes import Change, Trial
from torchmuster.bench.profile.trials_wanted import BATCH_TIMES, fitting_threads, in_full_precision
from torchmuster.bench.profile.usual_steps import mean_s, transfer_s
from torchmuster.pages.figures import amount

_ANOTHER_PRECISION_FROM = 1.15
_ANOTHER_BATCH_FROM = 1.5


def too_many_threads(analysis: Analysis, trials: Sequence[Trial]) -> Cause | None:
    """Find ranks that have more threads than cores."""
    facts = analysis.facts[0]
    fitting, trial = fitting_threads(facts), tried(trials, "threads")
    if fitting is None or (trial is not None and not confirmed(trial)):
        return None
    switches = sum(one.switches for step in analysis.steps for one in step.values())
    each = switches / (len(analysis.steps) * len(analysis.ranks))
    return Cause(
        name="too-many-threads",
        what=f"{facts.ranks_here} ranks of {facts.threads} threads share {facts.cores} cores",
        would=f"{fitting} {'thread' if fitting == 1 else 'threads'} each would give",
        gain=None if trial is None else trial.gain,
        known_by="trial",
        why="threads that have no core of their own wait for each other at the end of every operation",
        fix=f"torch.set_num_threads({fitting})     or for all ranks: OMP_NUM_THREADS={fitting}",
        evidence=f"a rank lost its core {each:.0f} times a step",
        change=Change(kind="threads", value=fitting),
    )


def full_precision(analysis: Analysis, trials: Sequence[Trial]) -> Cause | None:
    """Find products that are computed in 32 bits and would be faster in 16."""
    trial = tried(trials, "bf16")
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
        what="everything is computed in 32 bits",
        would="bf16 would give",
        gain=None if trial is None else trial.gain,
        known_by="trial",
        why="weights stay as exact as they are; only products of matrices are computed in 16 bits, which "
        f"{'most devices do' if trial is None else 'this device does'} faster",
        fix=f'with torch.autocast("{analysis.facts[0].device.partition(":")[0]}", dtype=torch.bfloat16):\n'
        "or in the settings: train: {precision: bf16}. Compare the loss of both: muster bench precision",
        evidence=f"forward and backward take {amount(passes_s, 's')} of {amount(analysis.step_s, 's')}",
        change=Change(kind="bf16"),
        another_training=True,
    )


def tiny_batch(analysis: Analysis, trials: Sequence[Trial]) -> Cause | None:
    """Find steps with too few samples to make up for what a step costs in any case."""
    trial = tried(trials, "batch")
    gain = gains.of_batch(analysis.steps, BATCH_TIMES) if trial is None else trial.gain
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
        what=f"{batch} is too small for what a step costs in any case",
        would=f"{larger} would give{' at least' if trial is None else ''}",
        gain=gain,
        known_by="trace" if trial is None else "trial",
        why="sending gradients, the optimizer and the start of every operation cost the same for one sample as for many",
        fix=f"batch_size={'N' if size is None else times * size}, with a learning rate for it; or the same batch from fewer "
        "ranks\nwhat fits: muster plan --find-batch-size",
        evidence=f"sending and the optimizer take {amount(fixed_s, 's')} of {amount(analysis.step_s, 's')}",
        change=Change(kind="batch", value=times),
        another_training=True,
    )


def _idling_device(analysis: Analysis) -> Cause | None:
    """Say of a device that is not given work fast enough what may help; how much only a trial knows."""
    for one in analysis.ranks:
        small = one.trace.operations.smallness if one.trace and one.trace.on_device else None
        if small is not None and small.bound:
            return Cause(
                name="tiny-batch",
                what=f"rank {one.facts.rank}'s device idles {one.shares.part('idle'):.0%} of the step between small kernels",
                would="",
                gain=None,
                known_by="trial",
                why="a kernel is done before the host has started the next one: fewer and larger ones would keep the device busy",
                fix=f"a larger batch, or model = torch.compile(model)\nmuster profile tries {BATCH_TIMES} times the batch "
                "without --no-trials",
                evidence=f"{small.calls:,.0f} kernels a step, the median takes {amount(small.median_s, 's')}",
                change=Change(kind="batch", value=BATCH_TIMES),
                another_training=True,
            )
    return None
