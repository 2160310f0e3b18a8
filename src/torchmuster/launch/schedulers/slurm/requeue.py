"""A job that saved before its time was up puts itself back into the queue, and goes on where it was."""

import re

from torchmuster.decision import Decision
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.saved import NOTHING_NEW
from torchmuster.launch.schedulers.slurm import clients
from torchmuster.units import format_seconds

# A script of the user's own that ran for so long has surely done something.
_LONG_S = 300.0


def would_not_get_on(
    spec: JobSpec, words: str, *, is_newer: bool, warned: bool, took_s: float
) -> str:
    """Say why a job that ended with 75 would go round for ever; "" if it gets on."""
    if spec.checkpoints is not None and words == NOTHING_NEW and not is_newer:
        return "it saved nothing new in all of its time, and would not get on; give it more: --time"
    if spec.checkpoints is None and not warned and took_s < _LONG_S:
        return (
            f"it ended with exit code 75 by itself after {format_seconds(took_s)}, without a warning, "
            "and might do so for ever"
        )
    return ""


def may_go_back(job: str, ask: clients.Ask = clients.ask, *, why_not: str = "") -> Decision[bool]:
    """Decide whether the job that this process runs in goes back into the queue.

    ``why_not``: it is known that it should not.
    """
    if why_not:
        return Decision(value=False, reason=f"job {job} stays out of the queue: {why_not}")
    by_hand = f"put it back into the queue by hand: scontrol requeue {job}"
    answer = ask(["scontrol", "show", "job", job])
    if answer is None or answer.code != 0:
        said = answer.err if answer is not None else "scontrol is not on this machine"
        return Decision(value=False, reason=f"Slurm does not tell of job {job} ({said}); {by_hand}")
    if re.search(r"\bRequeue=0\b", answer.out):
        reason = f"job {job} may not go back into the queue (Requeue=0); submit it again to go on"
        return Decision(value=False, reason=reason)
    return Decision(
        value=True, reason=f"job {job} goes back into the queue, and goes on when it starts"
    )


def requeue(job: str, ask: clients.Ask = clients.ask) -> str:
    """Put the job that this process runs in back into the queue; return what went wrong, "" if nothing.

    Slurm ends the job for it, and with it this process, perhaps before this returns: what is to be
    said must have been said.
    """
    answer = ask(["scontrol", "requeue", job])
    if answer is not None and answer.code == 0:
        return ""
    said = answer.err if answer is not None else "scontrol is gone"
    return f"job {job} stays out of the queue: {said}"
