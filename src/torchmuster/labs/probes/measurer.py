"""Measures a learner's code: ``python -m torchmuster.labs.probes.measurer REQUEST ANSWER``."""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from torchmuster.labs import lesson as course
from torchmuster.labs.measurements import MeasureAnswer, MeasureRequest
from torchmuster.labs.probes import ranks


def main(asked: str, answered: str) -> None:
    """Run a lab's measurements on its ranks; the answer is rank 0's."""
    torch.compiler.reset()  # imports torch's compiler, a second of work that each rank's first optimizer would do
    request = msgspec.json.decode(Path(asked).read_bytes(), type=MeasureRequest)
    lesson = course.lesson(request.lab)
    module = importlib.import_module(f"torchmuster.labs.lessons.{lesson.module}.measurements")
    with tempfile.TemporaryDirectory(prefix="muster-lab-") as folder:
        outcomes = ranks.run_learner_ranks(
            module.measure,
            file=Path(request.file),
            ranks=lesson.measured_on,
            joined=lesson.measured_joined,
            folder=Path(folder),
            deadline_s=request.deadline_s,
        )
    worst = ranks.worst(outcomes)
    answer = {
        "parts": outcomes[0].value or [],
        "mistake": worst.mistake,
        "seen": worst.seen,
        "measured_on": _measured_on(lesson.measured_on),
    }
    Path(answered).write_bytes(msgspec.json.encode(msgspec.convert(answer, MeasureAnswer)))


def _measured_on(ranks: int) -> str:
    cores = len(os.sched_getaffinity(0))
    count = "one process" if ranks == 1 else f"{ranks} ranks"
    return f"torch {torch.__version__}, {cores} cores, {count}"


if __name__ == "__main__":
    main(*sys.argv[1:])
