"""Run the training under the recorder on fresh local ranks: to profile it, and to try changes."""

import logging
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch import local_ranks
from torchmuster.profile.facts import (
    REQUEST_FILE,
    Change,
    ProfileRequest,
    RankFacts,
    Trial,
    read_facts,
)

PROGRAM = "torchmuster.profile.probes.profiled"
_FEWEST_STEPS = 3  # without the profiler: fewer are not enough to know the step time
_TRIAL_STEPS = 15  # of one run; the first ones warm up
_ROUNDS = 2  # and one more for a change whose first ones were unclear
_GLOBAL_BATCH, _MICRO_BATCH = "train.global_batch_size", "train.micro_batch_size"
_DEFAULT_MICRO_BATCH = 8

logger = logging.getLogger(__name__)
Say = Callable[[str], None]


def record_profile(request: ProfileRequest, say: Say = logger.info) -> list[RankFacts]:
    """Run the training up to the last requested step; return the facts by rank.

    ``request.into`` receives the request, facts and traces. A failing rank stops all ranks.
    """
    into, name = Path(request.into), _name(request)
    text = msgspec.json.encode(request)
    (into / REQUEST_FILE).write_bytes(text)
    ran = local_ranks.run_local_ranks(
        PROGRAM,
        text.decode(),
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
    facts = read_facts(into)
    _check_steps(request, facts)
    return facts


def _name(request: ProfileRequest) -> str:
    return "the training" if request.module else Path(request.command[0]).name


def _check_steps(request: ProfileRequest, facts: list[RankFacts]) -> None:
    fewest = min(facts, key=lambda rank: len(rank.steps))
    if not fewest.steps:
        raise Impossible(
            f"{_name(request)} made no steps to record",
            why="a step ends with torch.optim.Optimizer.step, and the first three steps are warm-up; "
            f"rank {fewest.rank} made no more steps",
            fix="train longer; only torch.optim optimizers are recognized",
        )
    unprofiled = sum(not step.profiled for step in fewest.steps)
    last = fewest.steps[-1].number
    if unprofiled < _FEWEST_STEPS or last < request.last_step:
        shorter = f"--steps {max(9, last // 2)}:{last}, or train longer"
        raise Impossible(
            f"{_name(request)} ended after step {last}",
            why=f"steps {request.first_step} to {request.last_step} were requested, and "
            f"{_FEWEST_STEPS} steps without the profiler are needed before them",
            fix="train longer" if last < 12 else shorter,
        )


def try_changes(
    request: ProfileRequest, changes: Sequence[Change], say: Say = logger.info
) -> list[Trial]:
    """Run the training without and with each change, alternately, one change at a time.

    A change that breaks the training, or that has no effect in it, is reported and skipped. Changes
    whose runs seem disturbed get one more.
    """
    trials = [Trial(change=change, before_s=(), after_s=()) for change in changes]
    for number in range(1, _ROUNDS + 2):
        due = [trial for trial in trials if number <= _ROUNDS or trial.is_unclear]
        if not due:
            break
        say(f"run {number}: the unchanged training")
        before_s = _step_s(_short_run(request, say))
        for trial in due:
            trials.remove(trial)
            change = trial.change
            say(f"run {number}: the training with {change}")
            try:
                facts = _short_run(with_change(request, change), say)
            except MusterError as error:
                say(f"{change} could not be tried: {error.why or error.what}")
                continue
            if any(rank.change_unused for rank in facts):
                say(f"{change} had no effect: the training does not use it")
                continue
            trials.append(Trial(
                change=change,
                before_s=(*trial.before_s, before_s),
                after_s=(*trial.after_s, _step_s(facts)),
                samples_factor=float(change.value) if change.kind == "batch" else 1.0,
            ))  # fmt: skip
    return trials


def _short_run(request: ProfileRequest, say: Say) -> list[RankFacts]:
    steps = min(_TRIAL_STEPS, request.last_step)
    with tempfile.TemporaryDirectory(prefix="muster-trial-") as folder:
        short = replace(request, into=folder, traces=False, first_step=steps, last_step=steps)
        return record_profile(short, say)


def _step_s(facts: Sequence[RankFacts]) -> float:
    """Return the typical step time: the median without the profiler, of the slowest rank."""
    medians = []
    for rank in facts:
        medians.append(statistics.median(step.took_s for step in rank.steps if not step.profiled))
    return max(medians)


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
