"""What is wrong with what ``muster plan`` was asked: refused before anything is traced, or told beside the answer."""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from torchmuster.config.here import looks_like_path
from torchmuster.config.resolve import Resolved
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import parse_hosts
from torchmuster.plan.answer import Answer
from torchmuster.units import plural


def is_here(options: argparse.Namespace) -> bool:
    """Say whether the plan is for this machine."""
    return bool(options.hardware.strip().lower() == "here")


def refuse_contradictions(options: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, and files that could not be written afterwards."""
    for flag, does in (("calibrate", "measures"), ("find_batch_size", "tries on")):
        if getattr(options, flag) and not is_here(options):
            raise Impossible(
                f"--{flag.replace('_', '-')} {does} this machine, and the plan is for "
                f"{options.hardware}",
                fix="leave out one of the two",
            )
    # A proof takes its steps here, also for a plan of other hardware: on so many ranks.
    for flag in ("num_gpus", "gpu_ids", *(() if options.verify else ("ranks",))):
        if getattr(options, flag) is not None and not is_here(options):
            raise Impossible(
                f"--{flag.replace('_', '-')} is for this machine, and the plan is for "
                f"{options.hardware}",
                fix="leave out one of the two; other hardware has its number in front: 8xH100",
            )
    for path in (options.write, options.html):
        if path is not None:
            _refuse_to_write(path)
    both = options.write is not None and options.config is not None
    if both and options.write.resolve() == options.config.resolve():
        raise Impossible(
            f"--write {options.write} is the file that --config reads",
            why="what you wrote into it would be lost",
            fix="write another one, such as --write plan.yaml",
        )


def _refuse_to_write(path: Path) -> None:
    why = ""
    if path.is_dir():
        why, fix = "it is a folder", f"name a file, such as {path / 'plan.yaml'}"
    elif not path.absolute().parent.is_dir():
        why, fix = "its folder is not there", "make the folder first"
    if why:
        raise Impossible(f"cannot write {path}", why=why, fix=fix)


def refuse_missing_model(resolved: Resolved) -> None:
    """Refuse a model's folder that is not there: a trace would find it out much later."""
    name = resolved.settings.model.model_name_or_path
    if name is None:
        return
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        why = "there is no config.json in it"
    elif looks_like_path(name) and not folder.is_dir():
        why = f"there is no such folder in {Path.cwd()}"
    else:
        return
    raise Impossible(
        f"there is no model in {name}",
        why=why,
        fix="check the path; a name on the hub is written as owner/name",
    )


def with_remarks(answer: Answer, resolved: Resolved) -> Answer:
    """Return the answer with what is to be told beside it; a cost that cannot be computed is left out."""
    findings = [*answer.findings, *_of_data(resolved), *_of_hosts(resolved, answer)]
    asked, time = answer.asked, answer.chosen.value.time
    if asked.tokens is not None and time is not None and time.tokens_per_s is None:
        findings.append(
            Finding(
                name="no-cost",
                status=Status.NOTE,
                what=f"how long {asked.tokens:.3g} tokens take is not said",
                why="how many tokens a sample of this model has is not known",
                fix="leave out --tokens, and divide your number of samples by the samples/s above",
            )
        )
        asked = dataclasses.replace(asked, tokens=None)
    return dataclasses.replace(answer, asked=asked, findings=tuple(findings))


def _of_data(resolved: Resolved) -> Iterator[Finding]:
    """Say so if the line to paste cannot run as it is."""
    data = resolved.settings.data
    if not (data.dataset or data.files or data.hugging_face):
        yield Finding(
            name="no-data",
            status=Status.NOTE,
            what="the line below names no data to train on",
            fix="add --config FILE with data, or --set data.files=PATTERN",
        )


def _of_hosts(resolved: Resolved, answer: Answer) -> Iterator[Finding]:
    """Say so if a training with these settings would run on other machines than the plan is for."""
    hosts = parse_hosts(resolved.settings.launch.hosts or ())
    machines = answer.asked.hardware.machines
    if hosts and len(hosts) != machines:
        one = plural(machines, "machine")
        yield Finding(
            name="other-machines",
            status=Status.WARNING,
            what=f"launch.hosts names {len(hosts)}, and this plan is for {one}",
            why=f"a plan does not look at hosts ({resolved.sources['launch.hosts'].where})",
            fix=f"--hardware {len(hosts)}x8xH100, with as many and such cards as each of them has",
        )
