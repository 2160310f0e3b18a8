"""``muster checkpoint``: list and verify checkpoints, and export their weights."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from torchmuster.checkpoints.export import (
    ADAPTER_CONFIG,
    ExportRequest,
    local_checkpoint,
    run_exporter,
)
from torchmuster.checkpoints.manifest import Manifest, best_manifest, committed_manifests
from torchmuster.checkpoints.store import Store, open_store, step_of
from torchmuster.checkpoints.verify import (
    UNFINISHED,
    inspect_checkpoint,
    newest_first,
    verify_checkpoint,
)
from torchmuster.cli import output
from torchmuster.cli.options import Command, JsonOptions, RunsOptions, argument, command, flag
from torchmuster.cli.which_run import choose_run, has_trained
from torchmuster.config.resolve import resolve_settings
from torchmuster.config.settings import Model, Settings
from torchmuster.errors import ConfigError, ExitCode, Impossible, MusterError
from torchmuster.finding import Finding
from torchmuster.redaction import harmless
from torchmuster.runfolder import RunFolder
from torchmuster.units import format_bytes, plural

BEST = "best"  # as a checkpoint's name
SAY_EVERY_S = 5.0
# What of a manifest --json prints; null if there is none.
_IN_JSON = ("made_unix_s", "world_size", "strategy", "global_batch_size", "size_bytes")


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(RunsOptions):
    """Where the checkpoints are."""

    place: str = argument(
        "a run's id or folder, or a folder or URL with checkpoints (default: last)",
        default="last",
        metavar="PLACE",
    )


@dataclass(frozen=True, kw_only=True)
class NameOptions(PlaceOptions):
    """One of the checkpoints."""

    name: str = argument(
        "a checkpoint's name, its step, or: best (by checkpoint.keep_best)",
        default="",
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class ListOptions(PlaceOptions, JsonOptions):
    """The flags of ``muster checkpoint list``."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(NameOptions, JsonOptions):
    """The flags of ``muster checkpoint verify``."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(NameOptions):
    """The flags of ``muster checkpoint export``."""

    to: Path = flag("a folder that does not exist yet", required=True, parse=Path, metavar="FOLDER")
    merge: bool = flag(
        "LoRA: merge the adapter into the base model's weights (needs memory for the whole model)",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """A checkpoint, and what is wrong with it."""

    name: str
    manifest: Manifest | None
    findings: list[Finding]

    @property
    def damage(self) -> list[Finding]:
        """The findings other than that it is unfinished."""
        return [finding for finding in self.findings if finding.name != UNFINISHED]

    def text(self, good: str) -> str:
        """Return its state in a word; ``good`` is that of a checkpoint without findings."""
        if self.damage:
            return "damaged"
        return "unfinished" if self.findings else good

    def as_json(self, good: str) -> dict[str, object]:
        """Return it as plain JSON types."""
        facts = {name: getattr(self.manifest, name, None) for name in _IN_JSON}
        return {
            "name": self.name,
            "step": step_of(self.name),
            "state": self.text(good),
            **facts,
            "findings": [finding.as_json() for finding in self.findings],
        }


def find_store(place: str, runs: Path) -> tuple[Store, RunFolder | None]:
    """Return the checkpoints of a run (its id or folder), of a folder or of a URL, and the run they belong to."""
    folder = Path(place)
    if "://" in place:
        return open_store(place), None
    if folder.is_dir() and not RunFolder(folder).marker.is_file():
        above = RunFolder(folder.absolute().parent)
        return open_store(folder), above if above.marker.is_file() else None
    run = choose_run(place, runs, has_trained)
    settings = settings_of(run)
    if settings is None or not settings.checkpoint.folder:
        return open_store(run.checkpoints), run
    return open_store(f"{settings.checkpoint.folder.rstrip('/')}/{run.id}"), run


def names_of(store: Store, wanted: str) -> list[str]:
    """Return the names of the wanted checkpoints (a name, a step, best; all if empty), newest first."""
    names = newest_first(store)
    if not wanted:
        return names
    chosen = [name for name in names if wanted in (name, str(step_of(name)))]
    why = f"the newest are: {', '.join(names[:5]) or 'none'}"
    if wanted == BEST:
        best = best_manifest(committed_manifests(store))
        chosen = [best.name] if best else []
        why = "the run had no checkpoint.keep_best, or no evaluation yet"
    if not chosen:
        raise Impossible(
            f"there is no checkpoint {harmless(wanted)!r} in {store.where}",
            why=why,
            fix="give a name or a step number: muster checkpoint list shows them",
        )
    return chosen


def settings_of(run: RunFolder) -> Settings | None:
    """Return the settings that a run was started with; None for a run of a script."""
    if not run.config.is_file():
        return None
    try:
        return resolve_settings(file=run.config).settings
    except ConfigError:  # of another version; its checkpoints may still be readable
        return None


@command(
    ListOptions,
    summary="list checkpoints, newest first",
    more="Checks file sizes only; verify also checks the content.",
    examples=["muster checkpoint list", "muster checkpoint list s3://bucket/run --json"],
)
def list_checkpoints(options: ListOptions) -> int:
    """Print the checkpoints."""
    store, _ = find_store(options.place, options.runs)
    seen = []
    for name in names_of(store, ""):
        manifest, findings = inspect_checkpoint(store, name)
        seen.append(CheckpointState(name=name, manifest=manifest, findings=findings))
    best = best_manifest(row.manifest for row in seen if row.manifest is not None)
    described = []
    rows = [("name", "step", "saved", "ranks", "strategy", "size", "state")]
    for row in seen:
        metrics = best.best if best is not None and row.manifest is best else None
        described.append(row.as_json("complete") | {"best": metrics})
        rows.append(_cells(row, metrics))
    if options.json:
        output.print_json(described)
    elif not seen:
        output.print_text(f"no checkpoints in {store.where}")
    else:
        output.print_table(rows)
        damage = [finding for row in seen for finding in row.damage]
        if damage:
            output.show_findings(damage, sys.stdout)
    return ExitCode.GOOD


def _cells(
    row: CheckpointState, best: Mapping[str, float] | None
) -> tuple[str, str, str, str, str, str, str]:
    """Return a row of the list, with the metrics of the best checkpoint."""
    step, state, manifest = str(step_of(row.name)), row.text("complete"), row.manifest
    if manifest is None:
        return row.name, step, "-", "-", "-", "-", state
    if best:
        metrics = [f"{harmless(name)} {value:.4g}" for name, value in best.items()]
        state = f"{state}, best {', '.join(metrics)}"
    saved = f"{datetime.fromtimestamp(manifest.made_unix_s).astimezone():%Y-%m-%d %H:%M:%S}"
    size, ranks = format_bytes(manifest.size_bytes), str(manifest.world_size)
    return row.name, step, saved, ranks, manifest.strategy, size, state


@command(
    VerifyOptions,
    summary="read checkpoints and check the hash of every file",
    more="The exit code is 1 if a checkpoint is damaged, or if the checkpoint NAME is unfinished.",
    examples=["muster checkpoint verify", "muster checkpoint verify last 120"],
)
def verify(options: VerifyOptions) -> int:
    """Read every file and print a verdict on each checkpoint."""
    store, _ = find_store(options.place, options.runs)
    seen = []
    for name in names_of(store, options.name):
        row = _verified(store, name)
        seen.append(row)
        if options.json:
            continue
        if row.findings or row.manifest is None:
            output.show_findings(row.findings, sys.stdout)
        else:
            files = plural(len(row.manifest.files), "file")
            size = format_bytes(row.manifest.size_bytes)
            output.print_text(f"{name}  good: {files}, {size}, all hashes match")
    if options.json:
        output.print_json([row.as_json("good") for row in seen])
    elif not seen:
        output.print_text(f"no checkpoints in {store.where}")
    failed = any(row.findings if options.name else row.damage for row in seen)
    return ExitCode.FAILED if failed else ExitCode.GOOD


@command(
    ExportOptions,
    summary="write a checkpoint's weights as safetensors that transformers loads",
    more="""
    Without NAME, exports the newest good checkpoint. Verifies it first. A separate process then
    compares every name with those that transformers or peft expects, and every tensor with the
    checkpoint's; for merged weights the logits. For a LoRA run, writes an adapter that peft loads.
    """,
    examples=[
        "muster checkpoint export --to my-model",
        "muster checkpoint export --merge --to my-model",
    ],
)
def export(options: ExportOptions) -> int:
    """Export the weights of a checkpoint and check them."""
    store, run = find_store(options.place, options.runs)
    model_files = run.model if run is not None and run.model.is_dir() else None
    if options.merge and (model_files is None or not (model_files / ADAPTER_CONFIG).is_file()):
        raise Impossible(
            "there is no LoRA adapter to merge",
            why=f"there is no {ADAPTER_CONFIG} for {store.where}; only LoRA runs have one",
            fix="leave out --merge, or give a LoRA run",
        )
    manifest = _newest_good(store, options.name)
    settings = settings_of(run) if run is not None else None
    model = Model() if settings is None else settings.model
    if options.merge:
        output.say("merging the adapter into the base model's weights")
    with local_checkpoint(store, manifest) as checkpoint:
        done = run_exporter(
            ExportRequest(
                checkpoint=str(checkpoint),
                folder=str(options.to),
                beside=None if model_files is None else str(model_files),
                # The weights of a model that the user's code builds keep their names.
                as_it_is=model.build is not None and model.lora is None,
                merge=options.merge,
                base_dtype=model.torch_dtype or "float32",
            )
        )
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    size = format_bytes(done.size_bytes)
    output.print_text(f"{options.to}: {files}, {size}, from {manifest.name}")
    if done.beside:
        output.print_text(f"also written: {', '.join(done.beside)}")
    checks = [f"{plural(done.compared, 'tensor')} equal to those of checkpoint {manifest.name}"]
    if done.difference is not None:
        checks.append(
            f"logits equal to the run's model (difference {done.difference:.1g} of the largest logit)"
        )
    if done.unchecked:
        checks.append(done.unchecked)
    output.print_text(f"checked: {'; '.join(checks)}")
    if done.unchecked and {"config.json", ADAPTER_CONFIG} & set(done.beside):
        output.say(f"warning: {done.unchecked}")
    return ExitCode.GOOD


def _newest_good(store: Store, wanted: str) -> Manifest:
    """Return the checkpoint to export after verifying it; print findings on damaged ones."""
    names = names_of(store, wanted)
    for name in names:
        row = _verified(store, name)
        if row.manifest is not None and not row.findings:
            return row.manifest
        output.show_findings(row.findings, sys.stderr)
    if not names:
        raise Impossible(
            f"there are no checkpoints in {store.where}",
            fix="give a run, or a folder or URL with checkpoints: muster checkpoint list PLACE",
        )
    raise MusterError(
        f"nothing was exported: no checkpoint is good ({', '.join(names)})",
        why="the weights of a damaged checkpoint may be wrong without an error",
        fix="give another checkpoint: muster checkpoint list shows them",
    )


def _verified(store: Store, name: str) -> CheckpointState:
    """Read a checkpoint, with progress, and return what is wrong with it."""
    findings = verify_checkpoint(store, name, on_bytes=_progress(f"{name}: read"))
    manifest, _ = inspect_checkpoint(store, name)
    return CheckpointState(name=name, manifest=manifest, findings=findings)


def _progress(done: str) -> Callable[[int], None]:
    """Return a counter of bytes that prints progress on stderr at regular intervals."""
    done_bytes = 0
    printed_s = time.monotonic()

    def on_bytes(count: int) -> None:
        nonlocal done_bytes, printed_s
        done_bytes += count
        if time.monotonic() - printed_s >= SAY_EVERY_S:
            printed_s = time.monotonic()
            output.say(f"{done} {format_bytes(done_bytes)}")

    return on_bytes


run = Command(
    examples=[
        "muster checkpoint list                         list the checkpoints of the last run",
        "muster checkpoint verify s3://bucket/run       read every file and check its hash",
        "muster checkpoint export last --to my-model    export the newest good checkpoint",
        "muster checkpoint export last best --to my-model    export the best one",
    ],
    actions={"list": list_checkpoints, "verify": verify, "export": export},
)
