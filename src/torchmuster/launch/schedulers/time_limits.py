"""How long a scheduler lets a job run after its stop signal, and the grace period that fits into it."""

import re
import time
from collections.abc import Mapping

from torchmuster.decision import Decision
from torchmuster.launch.schedulers.slurm import jobs

# Set in the manifests of muster kubernetes: the pod's terminationGracePeriodSeconds.
POD_VARIABLE = "TORCHMUSTER_TERMINATION_GRACE_S"
# For the launcher, to kill ranks that do not stop, to report them and to exit.
_MARGIN_S = 5.0
_USUAL_KILL_WAIT_S = 30.0  # Slurm's default
_LONGEST_WARNING_S = 6 * 3600.0
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+) sec", re.MULTILINE)


def grace_within_limit(
    grace_s: float,
    *,
    given: bool,
    environment: Mapping[str, str],
    ask: jobs.Ask = jobs.run_slurm_command,
) -> Decision[float]:
    """Return the grace period of the ranks, shortened to what the scheduler of this process allows.

    A grace period that the user has ``given`` is kept: a scheduler may allow more than its usual limit. The reason is
    "" if there is nothing to report.
    """
    limit_s, whose = _limit(environment, ask)
    fits_s = grace_s if limit_s is None else max(limit_s - _MARGIN_S, limit_s / 2)
    if limit_s is None or grace_s <= fits_s:
        return Decision(value=grace_s, reason="")
    told = f"{whose} is {limit_s:g} s"
    if given:
        reason = f"launch.grace {grace_s:g}s may be cut short: {told}"
        return Decision(value=grace_s, reason=reason)
    reason = f"grace period: {fits_s:g} s, because {told}"
    return Decision(value=fits_s, reason=reason)


def _limit(environment: Mapping[str, str], ask: jobs.Ask) -> tuple[float | None, str]:
    """Return how long processes live after the scheduler's SIGTERM, and the name of that limit."""
    pod = environment.get(POD_VARIABLE, "")
    if pod.isdecimal():
        return float(pod), "the pod's terminationGracePeriodSeconds"
    if "SLURM_JOB_ID" not in environment:
        return None, ""
    answer = ask(["scontrol", "show", "config"])
    found = _KILL_WAIT.search(answer.out) if answer is not None else None
    return float(found[1]) if found else _USUAL_KILL_WAIT_S, "Slurm's KillWait"


def seconds_to_job_end(environment: Mapping[str, str]) -> float:
    """Return how long ranks may take after a scheduler's warning: until shortly before the job's time limit."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        return _LONGEST_WARNING_S
    return min(max(_MARGIN_S, float(end) - time.time() - _MARGIN_S), _LONGEST_WARNING_S)
