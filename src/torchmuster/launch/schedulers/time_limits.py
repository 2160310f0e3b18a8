"""How long a scheduler lets a job run after its stop signal, and the grace period that fits into it."""

import time
from collections.abc import Mapping

from torchmuster.decision import Decision

# Set in the manifests of muster kubernetes: the pod's terminationGracePeriodSeconds.
POD_VARIABLE = "TORCHMUSTER_TERMINATION_GRACE_S"
# For the launcher, to kill ranks that do not stop, to report them and to exit.
_MARGIN_S = 5.0
_USUAL_KILL_WAIT_S = 30.0  # Slurm's default
_LONGEST_WARNING_S = 6 * 3600.0


def grace_within_limit(
    grace_s: float, *, given: bool, environment: Mapping[str, str]
) -> Decision[float]:
    """Return the grace period of the ranks, shortened to what the scheduler of this process allows.

    A grace period that the user has ``given`` is kept under Slurm: a cluster may allow more than Slurm's default, which is
    assumed. The reason is "" if there is nothing to report.
    """
    pod = environment.get(POD_VARIABLE, "")
    if pod.isdecimal():
        limit_s, limit = float(pod), "the pod's terminationGracePeriodSeconds"
    elif "SLURM_JOB_ID" in environment and not given:
        limit_s, limit = _USUAL_KILL_WAIT_S, "Slurm's KillWait"
    else:
        return Decision(value=grace_s, reason="")
    fits_s = max(limit_s - _MARGIN_S, limit_s / 2)
    if grace_s <= fits_s:
        return Decision(value=grace_s, reason="")
    return Decision(
        value=fits_s, reason=f"grace period: {fits_s:g} s, because {limit} is {limit_s:g} s"
    )


def seconds_to_job_end(environment: Mapping[str, str]) -> float:
    """Return how long ranks may take after a scheduler's warning: until shortly before the job's time limit."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        return _LONGEST_WARNING_S
    return min(max(_MARGIN_S, float(end) - time.time() - _MARGIN_S), _LONGEST_WARNING_S)
