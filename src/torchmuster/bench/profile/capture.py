"""Run the training under the recorder on fresh local ranks, and write the profile folder."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from torchmuster import untrusted
from torchmuster.bench.profile.changes import ChangeTrial, TriedChange
from torchmuster.bench.profile.recording import ASKED, ProfileRequest, RankFacts, read_facts
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.plan.proof import fresh_ranks

PROGRAM = "torchmuster.bench.probes.profiled"
# Fewer steps are not enough to know the step time without the profiler.
_FEWEST_STEPS = 3


def new_folder(within: Path) -> Path:
    """Create a new folder named by the time."""
    name = time.strftime("%Y-%m-%d-%H%M%S")
    for number in range(1, 1000):
        folder = within / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise MusterError(
        f"cannot create a folder in {within}",
        why="there are already 1000 profiles with the current date and time",
        fix="pass another folder with --out",
    )


def record_profile(
    asked: ProfileRequest, *, say: Callable[[str], None] = lambda _: None
) -> list[RankFacts]:
    """Run the training up to the last requested step; return the facts by rank.

    ``asked.into`` receives the request, facts and traces. A failing rank stops all ranks.
    """
    into = Path(asked.into)
    request = msgspec.json.encode(asked)
    (into / ASKED).write_bytes(request)
    ran = fresh_ranks.run_fresh_ranks(
        PROGRAM,
        request.decode(),
        ranks=asked.ranks,
        device=asked.device,
        folder=asked.folder,
        name="profile",
        doing=f"{_capture_name(asked)}, up to step {asked.last_step}",
        say=say,
    )
    if ran.trouble is not None:
        raise MusterError(
            f"{_capture_name(asked)} failed while it was profiled",
            why=_seen(ran.trouble),
            fix=ran.trouble.fix or "check that it runs without the profiler: muster run",
        )
    if len(ran.texts) != asked.ranks:
        raise MusterError(
            f"{_capture_name(asked)} was not recorded on all ranks",
            why=f"only {len(ran.texts)} of {asked.ranks} ranks returned a result",
            fix="check whether the script exits by itself (os._exit)",
        )
    facts = read_facts(into)
    _refuse_too_few(asked, facts)
    return facts


def record_again(asked: ProfileRequest, into: Path, **differences: object) -> ProfileRequest:
    """Return the request with changes, for its own folder."""
    return dataclasses.replace(asked, into=str(into), **differences)  # type: ignore[arg-type]


def _refuse_too_few(asked: ProfileRequest, facts: list[RankFacts]) -> None:
    fewest = min(facts, key=lambda one: len(one.steps))
    plain = [step for step in fewest.steps if not step.profiled]
    if not fewest.steps:
        raise Impossible(
            f"{_capture_name(asked)} made no steps to record",
            why="a step ends with torch.optim.Optimizer.step, and the first three steps are warm-up; "
            f"rank {fewest.rank} made no more steps",
            fix="train longer; only torch.optim optimizers are recognized",
        )
    if len(plain) < _FEWEST_STEPS or fewest.steps[-1].number < asked.last_step:
        last = fewest.steps[-1].number
        raise Impossible(
            f"{_capture_name(asked)} ended after step {last}",
            why=f"steps {asked.first_step} to {asked.last_step} were requested, and "
            f"{_FEWEST_STEPS} steps "
            "without the profiler are needed before them",
            fix="train longer"
            if last < 12
            else f"--steps {max(8, last // 2)}:{last}, or train longer",
        )


def _capture_name(asked: ProfileRequest) -> str:
    return "the training" if asked.module else Path(asked.command[0]).name


def _seen(trouble: Finding) -> str:
    """Return the failure of the ranks, without their logs, which are deleted with their folder."""
    parts = (trouble.what, trouble.why, *trouble.evidence.splitlines())
    return "\n".join(part for part in parts if part and not part.startswith("log: "))


_STEPS = 15  # of one run; the first ones warm up
_MORE_ROUNDS = 2  # if the first ones were unclear


def measured_step_s(facts: Sequence[RankFacts]) -> float:
    """Return the typical step time: the median without the profiler, of the slowest rank."""
    return max(
        statistics.median(step.took_s for step in one.steps if not step.profiled) for one in facts
    )


def try_changes(
    asked: ProfileRequest,
    changes: Sequence[TriedChange],
    *,
    rounds: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[ChangeTrial, ...]:
    """Run the training without and with each change, alternately.

    A change that breaks the training, or that has no effect in it, is reported and skipped. If a
    run seems disturbed, a few more follow.
    """
    before: list[float] = []
    after: dict[TriedChange, list[float]] = {change: [] for change in changes}
    for number in range(rounds):
        for change in _round(asked, before, after, f"{number + 1} of {rounds}", say):
            del after[change]
    for _ in range(_MORE_ROUNDS):
        unclear = {one.change for one in _trials(before, after) if one.is_unclear}
        if not unclear:
            break
        again = {change: after[change] for change in unclear}
        for change in _round(asked, before, again, "repeated, as the runs differ", say):
            del after[change]
    return _trials(before, after)


def _round(
    asked: ProfileRequest,
    before: list[float],
    after: dict[TriedChange, list[float]],
    which: str,
    say: Callable[[str], None],
) -> list[TriedChange]:
    """Run the training once without and once with each change; return the changes that cannot be tried."""
    failed = []
    say(f"the unchanged training, {which}")
    before.append(measured_step_s(_run_capture(asked, say)))
    for change, taken_s in after.items():
        say(f"the training with {change}, {which}")
        try:
            facts = _run_capture(with_change(asked, change), say)
        except MusterError as error:
            say(f"{change} could not be tried: {error.why or error.what}")
            failed.append(change)
            continue
        unused = [text for one in facts for text in one.trouble if text.startswith(str(change))]
        if unused:
            say(unused[0])
            failed.append(change)
            continue
        taken_s.append(measured_step_s(facts))
    return failed


def _trials(
    before: Sequence[float], after: Mapping[TriedChange, Sequence[float]]
) -> tuple[ChangeTrial, ...]:
    return tuple(
        ChangeTrial(
            change=change,
            before_s=tuple(before),
            after_s=tuple(after_s),
            samples_factor=float(change.value) if change.kind == "batch" else 1.0,
        )
        for change, after_s in after.items()
    )


def _run_capture(asked: ProfileRequest, say: Callable[[str], None]) -> list[RankFacts]:
    with tempfile.TemporaryDirectory(prefix="muster-trial-") as place:
        steps = min(_STEPS, asked.last_step)
        question = record_again(
            asked,
            Path(place),
            traces=False,
            first_step=steps,
            last_step=steps,
        )
        return record_profile(question, say=say)


_TRIALS = "trials.json"


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Trials:
    trials: tuple[ChangeTrial, ...]
    proof: ChangeTrial | None


def write_trials(folder: Path, trials: Sequence[ChangeTrial], proof: ChangeTrial | None) -> None:
    """Save the results of trials and of ``--verify``."""
    kept = _Trials(trials=tuple(trials), proof=proof)
    (folder / _TRIALS).write_bytes(msgspec.json.encode(kept))


def read_trials(folder: Path) -> tuple[tuple[ChangeTrial, ...], ChangeTrial | None]:
    """Return the saved results; empty without trials."""
    if not (folder / _TRIALS).exists():
        return (), None
    kept = _decoded(folder / _TRIALS, _Trials)
    return kept.trials, kept.proof


def read_asked(folder: Path) -> ProfileRequest:
    """Return the request of a profile."""
    return _decoded(folder / ASKED, ProfileRequest)


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return untrusted.read_typed(path, msgspec.json.Decoder(kind).decode)
    except (untrusted.Unreadable, OSError) as error:
        raise MusterError(
            f"cannot read {path}",
            why=str(error),
            fix="pass a folder written by muster profile, or profile again",
        ) from error


_GLOBAL, _MICRO = "train.global_batch_size", "train.micro_batch_size"


_USUAL_MICRO_BATCH = 8  # the default of train.micro_batch_size


def with_change(asked: ProfileRequest, change: TriedChange) -> ProfileRequest:
    """Return the request for the training with a change.

    Changes that settings support are applied as settings; all others, and all changes of a script,
    by the recorder.
    """
    if not asked.with_run_folder:
        return dataclasses.replace(asked, changes=(change,))
    if change.kind == "workers":
        return _capture_message(asked, {"data.workers": change.value})
    if change.kind == "bf16":
        return _capture_message(asked, {"train.precision": "bf16"})
    if change.kind == "batch":
        return _capture_message(asked, _batch(asked, change.value))
    return dataclasses.replace(asked, changes=(change,))


def _batch(asked: ProfileRequest, times: int) -> dict[str, int]:
    given = {
        path: int(value)
        for path, _, value in (word.partition("=") for word in asked.command)
        if path in (_GLOBAL, _MICRO) and value.isdecimal()
    }
    whole, micro = given.get(_GLOBAL), given.get(_MICRO)
    if whole is None:
        return {_MICRO: (micro or _USUAL_MICRO_BATCH) * times}
    # A batch of larger micro-batches, not of more of them.
    own = max(1, whole // asked.ranks)
    return {_GLOBAL: whole * times, _MICRO: min(micro or _USUAL_MICRO_BATCH, own) * times}


def _capture_message(asked: ProfileRequest, settings: Mapping[str, int | str]) -> ProfileRequest:
    words = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    return dataclasses.replace(asked, command=(*asked.command, *words))
