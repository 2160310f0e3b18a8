"""``muster checkpoint``: what was saved, whether it is whole, and its weights as a folder for others."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from torchmuster.checkpoints.export import ADAPTER_CONFIG, export_weights
from torchmuster.checkpoints.manifest import Manifest
from torchmuster.checkpoints.places import open_store, place_of
from torchmuster.checkpoints.store import Store, step_of
from torchmuster.checkpoints.verify import look_at_checkpoint, newest_first, verify_checkpoint
from torchmuster.cli import output, parsers
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, ExitCode, Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.redaction import harmless
from torchmuster.runfolder import RunFolder, find_run
from torchmuster.units import format_bytes, plural


@dataclass(frozen=True, kw_only=True)
class Meant:
    """A store, one of its checkpoints if one was named, and the run if they are a run's."""

    store: Store
    wanted: str = ""
    run: RunFolder | None = None

    def names(self) -> list[str]:
        """Return the names of the checkpoints that are meant, the newest first."""
        names = newest_first(self.store)
        if not self.wanted:
            return names
        step = int(self.wanted) if self.wanted.isdecimal() and len(self.wanted) < 16 else None
        chosen = [
            one
            for one in names
            if one == self.wanted or (step is not None and step_of(one) == step)
        ]
        if not chosen:
            known = ", ".join(names[:5])
            raise Impossible(
                f"there is no checkpoint {harmless(self.wanted)!r} in {self.store.where}",
                why=f"the newest are: {known}" if known else "there is none at all",
                fix="give a name, or the number of a step: muster checkpoint ls shows them",
            )
        return chosen

    def model_files(self) -> Path | None:
        """Return the folder with what belongs to the run's model next to its weights, if the run has one."""
        return self.run.model if self.run is not None and self.run.model.is_dir() else None

    def is_own_model(self) -> bool:
        """Say whether the weights are of a model that the user's code builds, which alone knows their names."""
        settings = _settings_of(self.run) if self.run is not None else None
        if settings is None:
            return False
        return settings.model.build is not None and settings.model.lora_rank is None

    def dtype(self) -> str:
        """Return the dtype that the run holds the weights of its base model in."""
        settings = _settings_of(self.run) if self.run is not None else None
        return (settings.model.torch_dtype if settings else None) or "float32"


def meant_by(place: str, wanted: str, *, runs: Path) -> Meant:
    """Find what is meant by a run's id or folder, a folder, a URL, or one checkpoint's own folder or name."""
    if step_of(place) is not None and not wanted:
        place, wanted = "last", place
    parent, _, last = place.rstrip("/").rpartition("/")
    if parent and step_of(last) is not None:
        place, wanted = parent, last
    if "://" in place:
        return Meant(store=open_store(place), wanted=wanted)
    folder = Path(place)
    if folder.is_dir() and not RunFolder(folder).marker.is_file():
        return Meant(store=open_store(folder), wanted=wanted, run=_run_above(folder))
    run = find_run(place, runs)
    settings = _settings_of(run)
    given = settings.checkpoint.folder if settings else None
    return Meant(store=open_store(place_of(run, given)), wanted=wanted, run=run)


def _run_above(folder: Path) -> RunFolder | None:
    run = RunFolder(folder.absolute().parent)
    return run if run.marker.is_file() else None


def _settings_of(run: RunFolder) -> Settings | None:
    """Return the settings that a run was started with; a script of one's own has none."""
    if not run.config.is_file():
        return None
    try:
        return resolve_settings(file=run.config).settings
    except ConfigError:  # of another version; its checkpoints may be readable all the same
        return None


_PROGRAM = "torchmuster.worker.exported"
# Nothing is fetched, and progress bars belong to whoever loads the model for use.
_SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


def check_export(folder: Path) -> str:
    """Raise an error if the folder would load wrong weights; return why that is not known here, or nothing."""
    return _ask(folder, [])


def merge(folder: Path, *, dtype: str) -> None:
    """Put the whole model in the place of a LoRA adapter; raise an error if that cannot be done here."""
    unchecked = _ask(folder, ["--merge", "--dtype", dtype])
    if unchecked:
        raise MusterError(
            "the adapter cannot be merged here",
            why=unchecked,
            fix="export it without --merge, or run this where the base model, transformers and peft are",
        )


def _ask(folder: Path, flags: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", _PROGRAM, str(folder), *flags],
        env={**os.environ, **_SURROUNDINGS},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"the check ended with exit code {done.returncode}: {last}"
    if "what" in answer:
        raise MusterError(answer["what"], why=answer["why"], fix=answer["fix"])
    return str(answer.get("unchecked", ""))


_SAID_EVERY_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``ls``, ``verify`` and ``export``."""
    parsers.show_examples(
        parser,
        [
            "muster checkpoint ls                           those of the last run",
            "muster checkpoint verify s3://bucket/run       read and compare every byte",
            "muster checkpoint export last --to my-model    the newest good one's weights",
        ],
    )
    parts = parser.add_subparsers(title="what to do", metavar="ACTION")

    ls = parsers.add_action(
        parts,
        "ls",
        "list checkpoints, the newest first",
        more="Sizes are compared; that the content is right only verify can say.",
        examples=["muster checkpoint ls", "muster checkpoint ls s3://bucket/run --json"],
    )
    _add_place(ls, name=False)
    parsers.add_json_flag(ls)
    ls.set_defaults(run=_ls)

    check = parsers.add_action(
        parts,
        "verify",
        "read checkpoints and compare every file with what was written",
        more="The exit code is 1 if one is damaged, or the one that was named is not finished.",
        examples=["muster checkpoint verify", "muster checkpoint verify last 120"],
    )
    _add_place(check)
    parsers.add_json_flag(check)
    check.set_defaults(run=_verify)

    export = parsers.add_action(
        parts,
        "export",
        "write a checkpoint's weights as safetensors that transformers loads",
        more="The newest good checkpoint, if none is named. It is verified first, and the result is checked with "
        "transformers. Of a LoRA run it writes an adapter that peft loads. Memory stays small.",
        examples=[
            "muster checkpoint export --to my-model",
            "muster checkpoint export --merge --to my-model",
        ],
    )
    _add_place(export)
    export.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="a folder that does not exist yet"
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="LoRA: add the adapter to the base model's weights (needs memory for the whole model)",
    )
    export.set_defaults(run=_export)


def _add_place(parser: argparse.ArgumentParser, *, name: bool = True) -> None:
    parser.add_argument(
        "place",
        nargs="?",
        default="last",
        metavar="PLACE",
        help="a run's id or folder, a folder or URL with checkpoints, or one of them (last)",
    )
    if name:
        parser.add_argument(
            "name", nargs="?", default="", metavar="NAME", help="a checkpoint's name, or its step"
        )
    parsers.add_runs_flag(parser)


def _ls(options: argparse.Namespace) -> int:
    meant = _checkpoint_place(options)
    rows = [(name, *look_at_checkpoint(meant.store, name)) for name in meant.names()]
    if options.json:
        output.print_json([_checkpoint_as_json(*row) for row in rows])
        return ExitCode.GOOD
    if not rows:
        print(f"no checkpoints in {meant.store.where}")
        return ExitCode.GOOD
    table: list[tuple[str, ...]] = [("step", "saved", "ranks", "strategy", "size", "state", "name")]
    table += [_checkpoint_cells(*row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(_aligned(row, widths)).rstrip())
    findings = [one for _, _, found in rows for one in found if _is_damage(one)]
    if findings:
        output.show_findings(findings, sys.stdout)
    return ExitCode.GOOD


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    numbers = (0, 2, 4)
    return [
        cell.rjust(width) if column in numbers else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _checkpoint_cells(
    name: str, manifest: Manifest | None, findings: list[Finding]
) -> tuple[str, ...]:
    step, state = str(step_of(name)), _checkpoint_state(findings)
    if manifest is None:
        return step, "-", "-", "-", "-", state, name
    saved = datetime.fromtimestamp(manifest.made_unix_s).astimezone()
    size = format_bytes(manifest.size_bytes)
    ranks, strategy = str(manifest.world_size), harmless(manifest.strategy)
    return step, f"{saved:%Y-%m-%d %H:%M:%S}", ranks, strategy, size, state, name


def _checkpoint_state(findings: list[Finding]) -> str:
    if not findings:
        return "complete"
    return "damaged" if any(_is_damage(one) for one in findings) else "unfinished"


def _is_damage(finding: Finding) -> bool:
    return finding.name != "checkpoint-unfinished"


def _checkpoint_as_json(
    name: str, manifest: Manifest | None, findings: list[Finding]
) -> dict[str, object]:
    return {
        "name": name,
        "step": step_of(name),
        "state": _checkpoint_state(findings),
        "made_unix_s": manifest.made_unix_s if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "strategy": manifest.strategy if manifest else None,
        "global_batch_size": manifest.global_batch_size if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "findings": [one.as_json() for one in findings],
    }


def _verify(options: argparse.Namespace) -> int:
    meant = _checkpoint_place(options)
    rows = []
    for name in meant.names():
        manifest, _ = look_at_checkpoint(meant.store, name)
        findings = verify_checkpoint(
            meant.store, name, on_bytes=_Progress(f"{name}: read", manifest)
        )
        rows.append((name, manifest, findings))
        if not options.json:
            _show_verdict(name, manifest, findings)
    if options.json:
        output.print_json(
            [_checkpoint_as_json(*row) | {"state": _checkpoint_verdict(row[2])} for row in rows]
        )
    elif not rows:
        print(f"no checkpoints in {meant.store.where}")
    failed = [one for _, _, findings in rows for one in findings if meant.wanted or _is_damage(one)]
    return ExitCode.FAILED if failed else ExitCode.GOOD


def _checkpoint_verdict(findings: list[Finding]) -> str:
    return _checkpoint_state(findings) if findings else "good"


def _show_verdict(name: str, manifest: Manifest | None, findings: list[Finding]) -> None:
    if manifest is not None and not findings:
        size = format_bytes(manifest.size_bytes)
        print(f"{name}  good: {len(manifest.files)} files, {size}, all as written", flush=True)
    else:
        output.show_findings(findings, sys.stdout)


def _export(options: argparse.Namespace) -> int:
    meant = _checkpoint_place(options)
    beside = meant.model_files()
    if options.merge and (beside is None or not (beside / ADAPTER_CONFIG).is_file()):
        raise Impossible(
            "there is no LoRA adapter to merge",
            why=f"no {ADAPTER_CONFIG} is known for {meant.store.where}: a run that trains the whole model has none",
            fix="leave out --merge, or give a LoRA run",
        )
    name = _good_one(meant)
    manifest, _ = look_at_checkpoint(meant.store, name)
    unchecked = ""

    def finish(folder: Path) -> None:
        nonlocal unchecked
        if options.merge:
            output.say("adding the adapter to the base model's weights")
            merge(folder, dtype=meant.dtype())
        elif any((folder / one).is_file() for one in ("config.json", ADAPTER_CONFIG)):
            output.say("checking the export with the library that loads it")
            unchecked = check_export(folder)

    done = export_weights(
        meant.store,
        name,
        options.to,
        beside=beside,
        as_it_is=meant.is_own_model(),
        finish=finish,
        on_bytes=_Progress("written", manifest),
    )
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    tensors = plural(done.tensors, "tensor")
    size = format_bytes(done.size_bytes)
    print(f"{options.to}: {files}, {tensors}, {size}, from {name}")
    if done.beside:
        print(f"next to {'it' if len(done.files) == 1 else 'them'}: {', '.join(done.beside)}")
    if unchecked:
        output.say(f"warning: not checked with the library that loads it: {unchecked}")
    print(_how_to_load(options.to, done.beside))
    return ExitCode.GOOD


def _how_to_load(folder: Path, beside: Sequence[str]) -> str:
    if ADAPTER_CONFIG in beside:
        return f'load it with: peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")'
    if "config.json" in beside:
        return f'load it with: transformers.AutoModelForCausalLM.from_pretrained("{folder}")'
    return "no config.json is known for this model; transformers needs it next to the weights"


def _good_one(meant: Meant) -> str:
    """Return the checkpoint to export, all of it read and found good; say which ones were not."""
    names = meant.names()
    for name in names:
        manifest, _ = look_at_checkpoint(meant.store, name)
        findings = verify_checkpoint(
            meant.store, name, on_bytes=_Progress(f"{name}: read", manifest)
        )
        if not findings:
            return name
        output.show_findings(findings, sys.stderr)
    if not names:
        raise Impossible(
            f"there are no checkpoints in {meant.store.where}",
            fix="give a run, or a folder or URL that has some: muster checkpoint ls PLACE",
        )
    raise MusterError(
        f"nothing was exported: none of {len(names)} checkpoints is good"
        if len(names) > 1
        else f"nothing was exported: {names[0]} is not good",
        why="weights of a damaged checkpoint would be wrong without showing it",
        fix="name another one: muster checkpoint ls shows them",
    )


def _checkpoint_place(options: argparse.Namespace) -> Meant:
    return meant_by(options.place, getattr(options, "name", ""), runs=options.runs)


class _Progress:
    """Says on stderr how far it is, so that nothing is silent for long."""

    def __init__(self, words: str, manifest: Manifest | None) -> None:
        self._words = words
        self._total = f" of {format_bytes(manifest.size_bytes)}" if manifest else ""
        self._done_bytes = 0
        self._said_s = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done_bytes += count
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAID_EVERY_S:
            self._said_s = now_s
            output.say(f"{self._words} {format_bytes(self._done_bytes)}{self._total}")
