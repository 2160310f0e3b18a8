"""How to resume a script: from which checkpoint, with which arguments, and the messages about it.

A script that torchmuster did not write resumes in its own way. A restart adds the arguments of ``--resume-with``, or the flag
that the scripts of its library have by convention, if the user's command has it: of a flag that is given twice, scripts take
the last value. Otherwise the failure report prints the command.
"""

import itertools
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.checkpoints.foreign import Completeness, Condition
from torchmuster.finding import Finding, Status
from torchmuster.launch.history.run_state import RunJob
from torchmuster.launch.history.script_checkpoints import (
    ScriptCheckpoint,
    newest_usable,
    read_script_checkpoints,
)
from torchmuster.launch.job import JobSpec, is_ours
from torchmuster.redaction import printable, redact_command
from torchmuster.units import format_bytes, format_seconds

PATH = "{path}"
# The flag that a library's scripts have by convention.
_FLAGS = {
    "transformers": "--resume_from_checkpoint",
    "accelerate": "--resume_from_checkpoint",
    "lightning": "--ckpt_path",
}


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """From which checkpoint a script can resume, and the arguments for it; both may be unknown.

    ``is_certain``: the script takes these arguments, so a restart adds them.
    """

    checkpoint: ScriptCheckpoint | None = None
    unusable: tuple[tuple[str, Condition], ...] = ()  # newer checkpoints, and what is wrong
    arguments: tuple[str, ...] = ()
    is_certain: bool = False

    def on_restart(self) -> tuple[str, ...]:
        """Return the arguments that a restart adds to the script's."""
        return self.arguments if self.is_certain else ()


def plan_resume(job: JobSpec | RunJob, metrics: Path) -> ResumePlan:
    """Return how the script of a job resumes, from what its ranks recorded; nothing for torchmuster's own."""
    if is_ours(job.command):
        return ResumePlan()
    newest = newest_usable(read_script_checkpoints(metrics), on_other_hosts=bool(job.hosts))
    checkpoint = newest.usable
    arguments: list[str] = []
    is_certain = False
    if job.resume_with:
        is_certain = True
        arguments = list(job.resume_with)
        if checkpoint is not None:
            arguments = [word.replace(PATH, checkpoint.path) for word in arguments]
        elif any(PATH in word for word in arguments):
            arguments = []
    elif checkpoint is not None and checkpoint.library in _FLAGS:
        flag = _FLAGS[checkpoint.library]
        is_certain = _passes_value(job.command[1:], flag)
        arguments = [flag, checkpoint.path]
    return ResumePlan(
        checkpoint=checkpoint,
        unusable=newest.unusable,
        arguments=tuple(arguments),
        is_certain=is_certain,
    )


def _passes_value(arguments: Sequence[str], flag: str) -> bool:
    """Return whether the user's own command gives this flag a value, so that the script certainly takes one."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        if argument.startswith(f"{flag}=") or (argument == flag and not following.startswith("-")):
            return True
    return False


# ---- texts


def resume_finding(job: JobSpec | RunJob, plan: ResumePlan) -> Finding | None:
    """Return what a user needs to resume a run that did not finish; None if its script saved nothing."""
    why = _unusable_lines(plan)
    newest = plan.checkpoint
    if newest is None:
        if not plan.unusable:
            return None
        return Finding(
            name="no-complete-checkpoint",
            status=Status.WARNING,
            what="the script saved checkpoints, but none of them is complete",
            why="\n".join(why),
            fix="start the script from the beginning",
        )
    what = f"the newest complete checkpoint is {checkpoint_text(newest)}"
    condition = newest.condition
    if condition.state is not Completeness.COMPLETE:
        what = f"the newest checkpoint is {checkpoint_text(newest)}"
        why.append(f"not checked: {condition.why}")
    return Finding(
        name="checkpoint-to-resume",
        status=Status.NOTE,
        what=what,
        why="\n".join(why),
        fix="\n".join(_how_to_resume(job, plan, newest)),
    )


def checkpoint_text(checkpoint: ScriptCheckpoint) -> str:
    """Return a checkpoint in a few words: ``step 40, 1.2 GiB, 3 min old: /data/out/checkpoint-40``."""
    facts = [f"step {checkpoint.step:,}"]
    if checkpoint.size_bytes is not None:
        facts.append(format_bytes(checkpoint.size_bytes))
    age_s = max(0.0, time.time() - checkpoint.at_unix_s)
    facts.append(f"{format_seconds(age_s)} old")
    return f"{', '.join(facts)}: {checkpoint.path}"


def _unusable_lines(plan: ResumePlan) -> list[str]:
    return [f"not used: {path} is {condition}" for path, condition in plan.unusable]


def _how_to_resume(
    job: JobSpec | RunJob, plan: ResumePlan, newest: ScriptCheckpoint
) -> Iterator[str]:
    """Return the command that resumes the script, to be pasted, and what the script must do if that is not known."""
    script = printable(job.command[:1])
    if not plan.arguments:
        yield f"load {newest.path} in {script}, then:"
    yield _typed(job, [*job.command, *plan.arguments])
    if plan.arguments and not plan.is_certain:
        yield f"# {script} must take {plan.arguments[0]}; a restart adds it with --resume-with"


def _typed(job: JobSpec | RunJob, command: Sequence[str]) -> str:
    typed = ["muster", job.typed[0], *job.flags]
    if job.module:
        typed.append("-m")
    elif not command[0].endswith(".py"):
        typed.append("--")
    return shlex.join(redact_command([*typed, *command]))


def restart_text(plan: ResumePlan) -> str:
    """Return the lines about resuming that a restart prints."""
    lines = _unusable_lines(plan)
    arguments = plan.on_restart()
    if arguments:
        lines.append(f"added to the script's arguments: {printable(arguments)}")
    else:
        lines.append(
            "the script starts from step 0, unless it resumes by itself; "
            f"if it has a flag to resume, pass it with --resume-with '--FLAG {PATH}'"
        )
    return "\n".join(lines)
