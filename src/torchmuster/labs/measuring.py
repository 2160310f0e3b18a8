"""A learner's code, measured: asked of a process of its own, which has torch."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from torchmuster.errors import MusterError
from torchmuster.labs import grading
from torchmuster.labs.desk import Desk
from torchmuster.labs.lesson import ANYWHERE
from torchmuster.labs.measured import Part

_MEASURER = "torchmuster.labs.probes.measurer"
DEADLINE_S = 120.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the measurer is asked."""

    lab: str
    file: str
    deadline_s: float = DEADLINE_S


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what; or the mistake that kept it from being measured."""

    parts: list[Part]
    measured_on: str
    mistake: str = ""
    seen: str = ""


def measure(desk: Desk, say: Callable[[str], None] = lambda _: None) -> Answer:
    """Run a lab's measurements with the learner's code."""
    request = Request(lab=desk.lesson.name, file=str(Path(desk.file).resolve()))
    told = grading.ask(
        _MEASURER, msgspec.json.encode(request), within_s=60 + 2 * DEADLINE_S, gpus=True, say=say
    )
    answer = msgspec.json.decode(told, type=Answer)
    if answer.mistake:
        word = desk.lesson.words.get(answer.mistake) or ANYWHERE[answer.mistake]
        raise MusterError(
            f"the report of {desk.lesson.name} needs code that runs: {word.what}",
            why=answer.seen or word.why,
            fix=f"muster lab check {desk.lesson.name}",
        )
    return answer
