"""How to resume a script: from which checkpoint, with which arguments, and the messages about it.

A script that torchmuster did not write resumes in its own way. A restart adds the arguments of ``--resume-with``, or replaces
the value of the flag that the scripts of its library have by convention, if the user's command has it. Otherwise the failure
report prints what to do.
"""

import itertools
import json
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
# The flag that a library's scripts have by convention, and the line of Python without a flag.
_FLAGS = {
    "transformers": "--resume_from_checkpoint",
    "accelerate": "--resume_from_checkpoint",
    "lightning": "--ckpt_path",
}
_LINES = {
    "transformers": "trainer.train(resume_from_checkpoint={path})",
    "accelerate": "accelerator.load_state({path})",
    "lightning": "trainer.fit(model, ckpt_path={path})",
    "deepspeed": "engine.load_checkpoint(*os.path.split({path}))",
    "DCP": "torch.distributed.checkpoint.load(state_dict, checkpoint_id={path})",
    "torch.save": "torch.load({path})",
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
    arguments, is_certain = _arguments(job, newest.usable)
    return ResumePlan(
        checkpoint=newest.usable,
        unusable=newest.unusable,
        arguments=arguments,
        is_certain=is_certain,
    )


def _arguments(
    job: JobSpec | RunJob, checkpoint: ScriptCheckpoint | None
) -> tuple[tuple[str, ...], bool]:
    if job.resume_with:
        words = job.resume_with
        if checkpoint is None:
            return (() if any(PATH in word for word in words) else tuple(words)), True
        return tuple(word.replace(PATH, checkpoint.path) for word in words), True
    if checkpoint is None or checkpoint.library not in _FLAGS:
        return (), False
    flag = _FLAGS[checkpoint.library]
    is_certain = _passes_value(job.command[1:], flag)
    return (flag, checkpoint.path), is_certain


def _passes_value(arguments: Sequence[str], flag: str) -> bool:
    """Return whether the user's own command gives this flag a value, so that the script certainly takes one."""
    if any(word.startswith(f"{flag}=") for word in arguments):
        return True
    return any(
        word == flag and not value.startswith("-") for word, value in itertools.pairwise(arguments)
    )


def with_arguments(command: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command with arguments at its end, replacing options that it already has."""
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    with_value = {word.partition("=")[0] for word in arguments if "=" in word} | {
        option
        for option, value in itertools.pairwise(arguments)
        if option in options and not value.startswith("-")
    }
    kept: list[str] = []
    replaced = ""  # the option before this word
    for word in command:
        is_value = replaced in with_value and not word.startswith("-")
        replaced = word if word.partition("=")[0] in options else ""
        if not replaced and not is_value:
            kept.append(word)
    return (*kept, *arguments)


# ---- texts


def resume_command(job: JobSpec | RunJob, plan: ResumePlan) -> str:
    """Return the command that resumes the script, for a shell; "" if its arguments are not known."""
    return _typed(job, with_arguments(job.command, plan.arguments)) if plan.arguments else ""


def _typed(job: JobSpec | RunJob, command: Sequence[str]) -> str:
    before = ["-m"] if job.module else [] if command[0].endswith(".py") else ["--"]
    return shlex.join(redact_command(["muster", job.typed[0], *job.flags, *before, *command]))


def resume_finding(job: JobSpec | RunJob, plan: ResumePlan) -> Finding | None:
    """Return what a user needs to resume a run that did not finish; None if its script saved nothing."""
    lines = [f"not used: {path} is {found}" for path, found in plan.unusable]
    newest = plan.checkpoint
    if newest is None:
        if not plan.unusable:
            return None
        return Finding(
            name="no-complete-checkpoint",
            status=Status.WARNING,
            what="the script saved checkpoints, but none of them is complete",
            why="\n".join(lines),
            fix="start the script from the beginning",
        )
    found = newest.condition
    is_complete = found.state is Completeness.COMPLETE
    return Finding(
        name="checkpoint-to-resume",
        status=Status.NOTE,
        what=f"the newest {'complete ' if is_complete else ''}checkpoint is {checkpoint_text(newest)}",
        why="\n".join(lines if is_complete else [*lines, f"not checked: {found.why}"]),
        fix="\n".join(_steps_to_resume(job, plan, newest)),
    )


def checkpoint_text(checkpoint: ScriptCheckpoint) -> str:
    """Return a checkpoint in a few words: ``step 40, 1.2 GiB, 3 min old: /data/out/checkpoint-40``."""
    age = format_seconds(max(0.0, time.time() - checkpoint.at_unix_s))
    size = "" if checkpoint.size_bytes is None else f", {format_bytes(checkpoint.size_bytes)}"
    return f"step {checkpoint.step:,}{size}, {age} old: {checkpoint.path}"


def _steps_to_resume(
    job: JobSpec | RunJob, plan: ResumePlan, newest: ScriptCheckpoint
) -> Iterator[str]:
    if command := resume_command(job, plan):
        yield command
    if plan.is_certain:
        return
    line = _LINES.get(newest.library, "{path}").format(
        path=json.dumps(newest.path, ensure_ascii=False)
    )
    script = printable(job.command[:1])
    if command:
        yield f"# {script} must pass the path on: {line}"
        return
    yield f"{line}   # in {script}; then run it again:"
    yield _typed(job, job.command)


def restart_text(plan: ResumePlan) -> str:
    """Return the lines about resuming that a restart prints."""
    lines = [f"not used: {path} is {found}" for path, found in plan.unusable]
    if arguments := plan.on_restart():
        return "\n".join([*lines, f"added to the script's arguments: {printable(arguments)}"])
    lines.append("the script starts from step 0, unless it resumes by itself")
    if plan.checkpoint is not None:
        flag = _FLAGS.get(plan.checkpoint.library, "--FLAG")
        lines[-1] += f"; if it has a flag to resume, pass it with --resume-with '{flag} {PATH}'"
    return "\n".join(lines)
