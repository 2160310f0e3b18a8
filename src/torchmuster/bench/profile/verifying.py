"""Changes tried on the training itself: fresh processes without and with a change, in turns."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchmuster.bench.profile import capture
from torchmuster.bench.profile.changes import Change, Trial
from torchmuster.bench.profile.recording_words import Asked, RankFacts
from torchmuster.bench.profile.settings_changes import with_change
from torchmuster.errors import MusterError

_STEPS = 15  # of one run; the first ones warm up
_MORE_ROUNDS = 2  # where those before were unclear


def step_s(facts: Sequence[RankFacts]) -> float:
    """Return the seconds of a usual step: the median of the steps without the profiler, of the slowest rank."""
    return max(
        statistics.median(step.took_s for step in one.steps if not step.profiled) for one in facts
    )


def tried(
    asked: Asked,
    changes: Sequence[Change],
    *,
    rounds: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Trial, ...]:
    """Run the training without and with each change, in turns, so that what the machine does besides meets all alike.

    A change that breaks the training, or that nothing in it used, is left out and told. Where a run seems to have been
    disturbed, there are a few more.
    """
    before: list[float] = []
    after: dict[Change, list[float]] = {change: [] for change in changes}
    for number in range(rounds):
        for change in _round(asked, before, after, f"{number + 1} of {rounds}", say):
            del after[change]
    for _ in range(_MORE_ROUNDS):
        unclear = {one.change for one in _trials(before, after) if one.is_unclear}
        if not unclear:
            break
        again = {change: after[change] for change in unclear}
        for change in _round(asked, before, again, "again, as runs differ", say):
            del after[change]
    return _trials(before, after)


def _round(
    asked: Asked,
    before: list[float],
    after: dict[Change, list[float]],
    which: str,
    say: Callable[[str], None],
) -> list[Change]:
    """Run the training once without and once with each change; return the changes that cannot be tried."""
    failed = []
    say(f"the training as it is, {which}")
    before.append(step_s(_run(asked, say)))
    for change, taken_s in after.items():
        say(f"the training with {change}, {which}")
        try:
            facts = _run(with_change(asked, change), say)
        except MusterError as error:
            say(f"{change} could not be tried: {error.why or error.what}")
            failed.append(change)
            continue
        unused = [text for one in facts for text in one.trouble if text.startswith(str(change))]
        if unused:
            say(unused[0])
            failed.append(change)
            continue
        taken_s.append(step_s(facts))
    return failed


def _trials(before: Sequence[float], after: Mapping[Change, Sequence[float]]) -> tuple[Trial, ...]:
    return tuple(
        Trial(
            change=change,
            before_s=tuple(before),
            after_s=tuple(after_s),
            samples_factor=float(change.value) if change.kind == "batch" else 1.0,
        )
        for change, after_s in after.items()
    )


def _run(asked: Asked, say: Callable[[str], None]) -> list[RankFacts]:
    with tempfile.TemporaryDirectory(prefix="muster-trial-") as place:
        steps = min(_STEPS, asked.last_step)
        question = capture.again(
            asked,
            Path(place),
            traces=False,
            first_step=steps,
            last_step=steps,
        )
        return capture.record(question, say=say)
