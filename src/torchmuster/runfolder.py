"""The run folder: the only contract between launching, training, watching and explaining a run.

``runs/<id>/`` holds everything about one run and works on any local or shared disk::

    run.json       id, name, when it was made, layout version
    config.yaml    the resolved settings, secrets redacted
    job.json       what was launched, where, by which process
    state.json     how it is going, or how it ended
    console.log    what the launcher showed
    logs/          rank-<n>.log
    model/         what belongs to the model next to its weights: its config, its tokenizer
    metrics/  checkpoints/  hang/
    report.html
"""

import errno
import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torchmuster.errors import Impossible, NoSuchRun

LAYOUT_VERSION = 1
DEFAULT_ROOT = Path("runs")
_PARTS = ("logs", "metrics", "checkpoints", "hang")
# What a disk says that takes nothing more: full, over a quota, a limit of files, or broken.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run. Made once by :func:`create`; everyone else gets it from :func:`find`."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id: the folder's name."""
        return self.path.name

    @property
    def marker(self) -> Path:
        """``run.json``, written last at creation: a folder without it is not a run."""
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.yaml"

    @property
    def job(self) -> Path:
        """What was launched."""
        return self.path / "job.json"

    @property
    def state(self) -> Path:
        """How the run is going, or how it ended."""
        return self.path / "state.json"

    @property
    def console(self) -> Path:
        """Everything the launcher showed."""
        return self.path / "console.log"

    @property
    def logs(self) -> Path:
        """One log file per rank."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """What the ranks measured."""
        return self.path / "metrics"

    @property
    def model(self) -> Path:
        """What belongs to the model next to its weights: its config, its tokenizer."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Saved training states."""
        return self.path / "checkpoints"

    @property
    def hang(self) -> Path:
        """Stacks and flight-recorder dumps of hangs."""
        return self.path / "hang"

    @property
    def report(self) -> Path:
        """The page made at the end of the run."""
        return self.path / "report.html"

    def rank_log(self, rank: int) -> Path:
        """Return the path of one rank's log."""
        return self.logs / f"rank-{rank}.log"


def create_run_folder(root: Path, name: str, *, now: datetime | None = None) -> RunFolder:
    """Make a new run folder below ``root``; its id starts with the time, so ids sort by age."""
    now = now or datetime.now(UTC)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "run"
    try:
        root.mkdir(parents=True, exist_ok=True)
        run = _new_folder(root, f"{now:%Y%m%d-%H%M%S}-{slug}")
        for part in _PARTS:
            (run.path / part).mkdir()
        marker = {"id": run.id, "name": name, "created": now.isoformat(), "layout": LAYOUT_VERSION}
        write_atomically(run.marker, json.dumps(marker, indent=2) + "\n")
    except OSError as error:
        raise Impossible(
            f"cannot make a run folder in {root}",
            why=error.strerror or str(error),
            fix="use a folder that exists, that you may write to, on a disk with room",
        ) from error
    return run


def _new_folder(root: Path, stem: str) -> RunFolder:
    while True:
        run = RunFolder(root / f"{stem}-{os.urandom(2).hex()}")
        try:
            run.path.mkdir()
        except FileExistsError:
            continue  # the same name in the same second drew the same suffix: draw again
        return run


def list_runs(root: Path) -> list[RunFolder]:
    """Return every run below ``root``, newest first."""
    if not root.is_dir():
        return []
    runs = [RunFolder(path) for path in root.iterdir() if (path / "run.json").is_file()]
    return sorted(runs, key=_age, reverse=True)


def _age(run: RunFolder) -> tuple[str, float]:
    """Order by the time in the id; within its second, by when the run was ready."""
    return run.id[: len("20260131-235959")], run.marker.stat().st_mtime


def run_name(run: RunFolder) -> str:
    """Return what a run is called: the name that it was made with."""
    try:
        return str(json.loads(run.marker.read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return run.id


def find_run(run: str | Path, root: Path = DEFAULT_ROOT) -> RunFolder:
    """Find a run by folder, id, unique part of an id, or the word ``last``."""
    given = RunFolder(Path(run).resolve())  # so that "." has a name as well
    if given.marker.is_file():
        return given
    known = list_runs(root)
    if str(run) == "last" and known:
        return known[0]
    matches = [one for one in known if str(run) == one.id] or [
        one for one in known if str(run) in one.id
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NoSuchRun(
            f"run {str(run)!r} is not unique",
            why="it could be any of: " + ", ".join(one.id for one in matches[:5]),
            fix="give more of the id, or the folder's path",
        )
    newest = ", ".join(one.id for one in known[:5])
    raise NoSuchRun(
        f"there is no run {str(run)!r}",
        why=f"the newest runs in {root} are: {newest}" if known else f"{root} holds no runs",
        fix="give a run's id, its folder, or the word: last",
    )


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file so that a reader, or a crash, sees either the old content or the new.

    What may be lost with the machine's power (a cache) need not be ``durable``, which takes time.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
