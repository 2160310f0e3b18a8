"""Run the training under the recorder on fresh local ranks: to profile it, and to try changes."""

import logging
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import local_ranks
from torchmuster.profile.facts import Change, ProfileRequest, RankFacts

PROGRAM = "torchmuster.profile.probes.profiled"
_FEWEST_STEPS = 3  # without the profiler: fewer are not enough to know the step time
_TRIAL_STEPS = 15  # of one run; the first ones warm up
_ROUNDS = 2
_GLOBAL_BATCH, _MICRO_BATCH = "train.global_batch_size", "train.micro_batch_size"
_DEFAULT_MICRO_BATCH = 8

logger = logging.getLogger(__name__)
Say = Callable[[str], None]


def record_profile(request: ProfileRequest, say: Say = logger.info) -> list[RankFacts]:
    """Run the training up to the last requested step; return the facts by rank.

    ``request.into`` receives the traces. A failing rank stops all ranks.
    """
    name = "the training" if request.module else Path(request.command[0]).name
    ran = local_ranks.run_local_ranks(
        PROGRAM,
        msgspec.json.encode(request).decode(),
        ranks=request.ranks,
        device=request.device,
        folder=request.folder,
        name="profile",
        typed=("profile",),
        doing=f"{name}, up to step {request.last_step}",
        say=say,
    )
    if ran.trouble is not None:
        raise MusterError(
            f"{name} failed while it was profiled",
            why=local_ranks.describe_failure(ran.trouble),
            fix=ran.trouble.fix or "check that it runs without the profiler: muster run",
        )
    if len(ran.texts) != request.ranks:
        raise MusterError(
            f"{name} was not recorded on all ranks",
            why=f"only {len(ran.texts)} of {request.ranks} ranks returned a result",
            fix="check whether the script exits by itself (os._exit)",
        )
    facts = [msgspec.json.decode(text, type=RankFacts) for _, text in sorted(ran.texts.items())]
    steps = min((rank.steps for rank in facts), key=len)
    unprofiled = sum(not step.profiled for step in steps)
    last = steps[-1].number if steps else 0
    if unprofiled < _FEWEST_STEPS or last < request.last_step:
        raise Impossible(
            f"{name} ended before step {request.last_step}",
            why=f"{len(steps)} steps were recorded; a step ends with torch.optim.Optimizer.step, and "
            "the first three are warm-up",
            fix="train longer, or profile earlier steps: --steps 9:10",
        )
    return facts


def try_changes(
    request: ProfileRequest, changes: Sequence[Change], say: Say = logger.info
) -> dict[Change, float]:
    """Run the training without and with each change, in turns; return the factors in samples/s.

    One change at a time, each run in new processes. The fastest of two runs counts, because other
    load only slows runs down. A change that breaks the training, or that has no effect in it, is
    reported and left out.
    """
    fastest_s: dict[Change | None, float] = {}
    left: list[Change | None] = [None, *changes]
    for number in range(1, _ROUNDS + 1):
        for change in list(left):
            say(f"run {number}: the training with {change or 'no change'}")
            try:
                facts = _short_run(request, change, say)
            except MusterError as error:
                if change is None:
                    raise
                say(f"{change} could not be tried: {error.why or error.what}")
                left.remove(change)
                continue
            if any(rank.change_unused for rank in facts):
                say(f"{change} had no effect: the training does not use it")
                left.remove(change)
                continue
            fastest_s[change] = min(_step_s(facts), fastest_s.get(change, math.inf))
    gains = {}
    for change in left:
        if change is not None:
            samples = change.value if change.kind == "batch" else 1
            gains[change] = samples * fastest_s[None] / fastest_s[change]
    return gains


def _short_run(request: ProfileRequest, change: Change | None, say: Say) -> list[RankFacts]:
    steps = min(_TRIAL_STEPS, request.last_step)
    if change is not None:
        request = with_change(request, change)
    with tempfile.TemporaryDirectory(prefix="muster-trial-") as folder:
        short = replace(request, into=folder, traces=False, first_step=steps, last_step=steps)
        return record_profile(short, say)


def _step_s(facts: Sequence[RankFacts]) -> float:
    """Return the typical step time: the median of the slowest rank."""
    return max(statistics.median(step.took_s for step in rank.steps) for rank in facts)


def with_change(request: ProfileRequest, change: Change) -> ProfileRequest:
    """Return the request for the training with a change.

    Changes that settings support are applied as settings; all others, and all changes of a script,
    by the recorder.
    """
    settings: dict[str, int | str] = {}
    if request.with_run_folder:
        if change.kind == "workers":
            settings = {"data.workers": change.value}
        elif change.kind == "bf16":
            settings = {"train.precision": "bf16"}
        elif change.kind == "batch":
            settings = dict(_batch_settings(request, change.value))
    if not settings:
        return replace(request, change=change)
    command = list(request.command)
    for path, value in settings.items():
        command += ["--set", f"{path}={value}"]
    return replace(request, command=tuple(command))


def _batch_settings(request: ProfileRequest, times: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for argument in request.command:
        path, _, value = argument.partition("=")
        if path in (_GLOBAL_BATCH, _MICRO_BATCH) and value.isdecimal():
            sizes[path] = int(value)
    micro = sizes.get(_MICRO_BATCH, _DEFAULT_MICRO_BATCH)
    if _GLOBAL_BATCH not in sizes:
        return {_MICRO_BATCH: micro * times}
    # A batch of larger micro-batches, not of more of them.
    own = max(1, sizes[_GLOBAL_BATCH] // request.ranks)
    return {_GLOBAL_BATCH: sizes[_GLOBAL_BATCH] * times, _MICRO_BATCH: min(micro, own) * times}
