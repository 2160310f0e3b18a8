"""Changes tried on the training itself: fresh processes without and with a change, in turns."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from torchmuster.errors import MusterError
from torchmuster.measure.profile import capture
from torchmuster.measure.profile.changes import Change, Trial
from torchmuster.measure.profile.recording_words import Asked, RankFacts
from torchmuster.measure.profile.settings_changes import with_change

_STEPS = 15  # of one run; the first ones warm up


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

    A change that breaks the training, or that nothing in it used, is left out and told.
    """
    before: list[float] = []
    after: dict[Change, list[float]] = {change: [] for change in changes}
    for number in range(rounds):
        say(f"the training as it is, {number + 1} of {rounds}")
        before.append(step_s(_run(asked, say)))
        for change in list(after):
            say(f"the training with {change}, {number + 1} of {rounds}")
            try:
                facts = _run(with_change(asked, change), say)
            except MusterError as error:
                say(f"{change} could not be tried: {error.why or error.what}")
                del after[change]
                continue
            unused = [text for one in facts for text in one.trouble if text.startswith(str(change))]
            if unused:
                say(unused[0])
                del after[change]
                continue
            after[change].append(step_s(facts))
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
