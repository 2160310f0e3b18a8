"""The run of a job that Slurm has started again: it goes on in the folder that it had."""

from collections.abc import Mapping
from pathlib import Path

from torchmuster.launch.history import run_state
from torchmuster.launch.job import JobSpec
from torchmuster.redaction import redact_command
from torchmuster.runfolder import RunFolder, list_runs


def earlier_run(spec: JobSpec, root: Path, environment: Mapping[str, str]) -> RunFolder | None:
    """Return the newest run of the same command in the same Slurm job; None on its first start."""
    job = environment.get("SLURM_JOB_ID")
    if job is None or environment.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    words = redact_command(spec.command)
    for run in list_runs(root):
        known = run_state.read_job(run)
        # What a job was told of its folder stands at the end of its command.
        if known is not None and known.slurm_job == job and known.command[: len(words)] == words:
            return run
    return None
