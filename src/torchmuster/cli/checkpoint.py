"""``muster checkpoint``: list and verify checkpoints, and export their weights."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from torchmuster import untrusted
from torchmuster.checkpoints.export import ADAPTER_CONFIG, export_weights
from torchmuster.checkpoints.export_check import CheckResult, ExportCheck, run_check
from torchmuster.checkpoints.manifest import Manifest, best_manifest, committed_manifests
from torchmuster.checkpoints.model_class import class_in_folder
from torchmuster.checkpoints.store import Store, open_store, step_of
from torchmuster.checkpoints.verify import look_at_checkpoint, newest_first, verify_checkpoint
from torchmuster.cli import output, parsers
from torchmuster.cli.which_run import choose_run
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Settings
from torchmuster.errors import ConfigError, ExitCode, Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.redaction import harmless
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_bytes, plural

BEST = "best"  # as a checkpoint's name


@dataclass(frozen=True, kw_only=True)
class Meant:
    """A checkpoint store, the requested checkpoint if any, and the run they belong to if any."""

    store: Store
    wanted: str = ""
    run: RunFolder | None = None

    def names(self) -> list[str]:
        """Return the names of the requested checkpoints, newest first."""
        names = newest_first(self.store)
        if not self.wanted:
            return names
        if self.wanted == BEST:
            best = best_manifest(committed_manifests(self.store))
            if best is None:
                raise Impossible(
                    f"there is no best checkpoint in {self.store.where}",
                    why="the run had no checkpoint.keep_best, or no evaluation yet",
                    fix="give a name or a step number: muster checkpoint list shows them",
                )
            return [best.name]
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
                why=f"the newest are: {known}" if known else "it contains no checkpoints",
                fix="give a name or a step number: muster checkpoint list shows them",
            )
        return chosen

    def model_files(self) -> Path | None:
        """Return the folder with the model's config and tokenizer, if the run has one."""
        return self.run.model if self.run is not None and self.run.model.is_dir() else None

    def is_own_model(self) -> bool:
        """Return whether the user's code builds the model, so that the weight names stay as is."""
        settings = _settings_of(self.run) if self.run is not None else None
        if settings is None:
            return False
        return settings.model.build is not None and settings.model.lora is None

    def dtype(self) -> str:
        """Return the dtype of the base model's weights in the run."""
        settings = _settings_of(self.run) if self.run is not None else None
        return (settings.model.torch_dtype if settings else None) or "float32"


def meant_by(place: str, wanted: str, *, runs: Path) -> Meant:
    """Find checkpoints by a run's id or folder, a folder, a URL, or a checkpoint's name."""
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
    run = choose_run(place, runs, "training")
    settings = _settings_of(run)
    given = settings.checkpoint.folder if settings else None
    place = f"{given.rstrip('/')}/{run.id}" if given else str(run.checkpoints)
    return Meant(store=open_store(place), wanted=wanted, run=run)


def _run_above(folder: Path) -> RunFolder | None:
    run = RunFolder(folder.absolute().parent)
    return run if run.marker.is_file() else None


def _settings_of(run: RunFolder) -> Settings | None:
    """Return the settings that a run was started with; None for a run of a script."""
    if not run.config.is_file():
        return None
    try:
        return resolve_settings(file=run.config).settings
    except ConfigError:  # of another version; its checkpoints may still be readable
        return None


_SAID_EVERY_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``verify`` and ``export``."""
    parsers.show_examples(
        parser,
        [
            "muster checkpoint list                         list the checkpoints of the last run",
            "muster checkpoint verify s3://bucket/run       read every file and check its hash",
            "muster checkpoint export last --to my-model    export the newest good checkpoint",
            "muster checkpoint export last best --to my-model    export the best one",
        ],
    )
    parts = parser.add_subparsers(title="actions", metavar="ACTION")

    listing = parsers.add_action(
        parts,
        "list",
        "list checkpoints, newest first",
        more="Checks file sizes only; verify also checks the content.",
        examples=["muster checkpoint list", "muster checkpoint list s3://bucket/run --json"],
    )
    _add_place(listing, name=False)
    parsers.add_json_flag(listing)
    listing.set_defaults(run=_list)

    check = parsers.add_action(
        parts,
        "verify",
        "read checkpoints and check the hash of every file",
        more="The exit code is 1 if a checkpoint is damaged, or if the checkpoint NAME is unfinished.",
        examples=["muster checkpoint verify", "muster checkpoint verify last 120"],
    )
    _add_place(check)
    parsers.add_json_flag(check)
    check.set_defaults(run=_verify)

    export = parsers.add_action(
        parts,
        "export",
        "write a checkpoint's weights as safetensors that transformers loads",
        more="Without NAME, exports the newest good checkpoint. Verifies it first. A separate process "
        "then\ncompares every name with those that transformers or peft expects, and every tensor with "
        "the\ncheckpoint's; for merged weights the logits. For a LoRA run, writes an adapter that peft "
        "loads.",
        examples=[
            "muster checkpoint export --to my-model",
            "muster checkpoint export --merge --dtype bfloat16 --to my-model",
        ],
    )
    _add_place(export)
    export.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="a folder that does not exist yet"
    )
    what = export.add_mutually_exclusive_group()
    what.add_argument(
        "--merge",
        action="store_true",
        help="LoRA: merge the adapter into the base model's weights (needs memory for the whole model)",
    )
    what.add_argument(
        "--adapter", action="store_true", help="LoRA: write the adapter alone (default)"
    )
    export.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="convert the weights (default: the dtype in the checkpoint)",
    )
    export.set_defaults(run=_export)


def _add_place(parser: argparse.ArgumentParser, *, name: bool = True) -> None:
    parser.add_argument(
        "place",
        nargs="?",
        default="last",
        metavar="PLACE",
        help="a run's id or folder, a folder or URL with checkpoints, or a checkpoint (default: last)",
    )
    if name:
        parser.add_argument(
            "name",
            nargs="?",
            default="",
            metavar="NAME",
            help="a checkpoint's name, its step, or: best (by checkpoint.keep_best)",
        )
    parsers.add_runs_flag(parser)


def _list(options: argparse.Namespace) -> int:
    meant = _checkpoint_place(options)
    rows = [(name, *look_at_checkpoint(meant.store, name)) for name in meant.names()]
    best = best_manifest(manifest for _, manifest, _ in rows if manifest is not None)
    if options.json:
        output.print_json(
            [
                _checkpoint_as_json(*row)
                | {"best": dict(best.best or {}) if best is not None and row[1] is best else None}
                for row in rows
            ]
        )
        return ExitCode.GOOD
    if not rows:
        output.print_text(f"no checkpoints in {meant.store.where}")
        return ExitCode.GOOD
    table: list[tuple[str, ...]] = [("step", "saved", "ranks", "strategy", "size", "state", "name")]
    table += [_checkpoint_cells(*row, is_best=best is not None and row[1] is best) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        output.print_text("  ".join(_aligned(row, widths)).rstrip())
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
    name: str, manifest: Manifest | None, findings: list[Finding], *, is_best: bool
) -> tuple[str, ...]:
    step, state = str(step_of(name)), _checkpoint_state(findings)
    if manifest is None:
        return step, "-", "-", "-", "-", state, name
    if is_best:
        metrics = ", ".join(
            f"{harmless(one)} {value:.4g}" for one, value in (manifest.best or {}).items()
        )
        state = f"{state}, best {metrics}"
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
        output.print_text(f"no checkpoints in {meant.store.where}")
    failed = [one for _, _, findings in rows for one in findings if meant.wanted or _is_damage(one)]
    return ExitCode.FAILED if failed else ExitCode.GOOD


def _checkpoint_verdict(findings: list[Finding]) -> str:
    return _checkpoint_state(findings) if findings else "good"


def _show_verdict(name: str, manifest: Manifest | None, findings: list[Finding]) -> None:
    if manifest is not None and not findings:
        size = format_bytes(manifest.size_bytes)
        output.print_text(f"{name}  good: {len(manifest.files)} files, {size}, all hashes match")
    else:
        output.show_findings(findings, sys.stdout)


def _export(options: argparse.Namespace) -> int:
    meant = _checkpoint_place(options)
    beside = meant.model_files()
    has_adapter = beside is not None and (beside / ADAPTER_CONFIG).is_file()
    if (options.merge or options.adapter) and not has_adapter:
        flag = "--merge" if options.merge else "--adapter"
        raise Impossible(
            f"there is no LoRA adapter to {flag.removeprefix('--') if options.merge else 'write'}",
            why=f"there is no {ADAPTER_CONFIG} for {meant.store.where}; only LoRA runs have one",
            fix=f"leave out {flag}, or give a LoRA run",
        )
    manifest = _newest_good(meant)
    checked = CheckResult()

    def finish(folder: Path) -> None:
        nonlocal checked
        if options.merge:
            output.say("merging the adapter into the base model's weights")
        output.say("checking the export in a separate process")
        checked = run_check(
            ExportCheck(
                folder=str(folder),
                merge=options.merge,
                dtype=options.dtype,
                base_dtype=meant.dtype(),
            )
        )

    done = export_weights(
        meant.store,
        manifest,
        options.to,
        beside=beside,
        as_it_is=meant.is_own_model(),
        finish=finish,
        on_bytes=_Progress("written and compared", manifest),
    )
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    tensors = plural(done.tensors, "tensor")
    size = format_bytes(done.size_bytes)
    output.print_text(f"{options.to}: {files}, {tensors}, {size}, from {manifest.name}")
    if done.beside:
        output.print_text(f"also written: {', '.join(done.beside)}")
    equal = f"{plural(done.compared, 'tensor')} equal to those of checkpoint {manifest.name}"
    output.print_text(f"checked: {'; '.join([equal, *checked.sentences()])}")
    if checked.unchecked and {"config.json", ADAPTER_CONFIG} & set(done.beside):
        output.say(f"warning: {checked.unchecked}")
    output.print_text(_how_to_load(options.to, done.beside))
    return ExitCode.GOOD


def _how_to_load(folder: Path, beside: Sequence[str]) -> str:
    if ADAPTER_CONFIG in beside:
        config = untrusted.read_json_object(folder / ADAPTER_CONFIG)
        if config.get("task_type") == "CAUSAL_LM":
            return f'load it with: peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")'
        return f'load it with: peft.PeftModel.from_pretrained(base_model, "{folder}")'
    if "config.json" in beside:
        auto = class_in_folder(folder).value.auto
        return f'load it with: transformers.{auto}.from_pretrained("{folder}")'
    return "there is no config.json for this model; transformers needs one next to the weights"


def _newest_good(meant: Meant) -> Manifest:
    """Return the checkpoint to export after verifying it; print findings on damaged ones."""
    names = meant.names()
    for name in names:
        manifest, _ = look_at_checkpoint(meant.store, name)
        findings = verify_checkpoint(
            meant.store, name, on_bytes=_Progress(f"{name}: read", manifest)
        )
        if manifest is not None and not findings:
            return manifest
        output.show_findings(findings, sys.stderr)
    if not names:
        raise Impossible(
            f"there are no checkpoints in {meant.store.where}",
            fix="give a run, or a folder or URL with checkpoints: muster checkpoint list PLACE",
        )
    raise MusterError(
        f"nothing was exported: none of {len(names)} checkpoints is good"
        if len(names) > 1
        else f"nothing was exported: {names[0]} is not good",
        why="the weights of a damaged checkpoint may be wrong without an error",
        fix="give another checkpoint: muster checkpoint list shows them",
    )


def _checkpoint_place(options: argparse.Namespace) -> Meant:
    return meant_by(options.place, getattr(options, "name", ""), runs=options.runs)


class _Progress:
    """Prints progress on stderr at regular intervals."""

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
