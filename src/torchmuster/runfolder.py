"""The run folder: the only interface between launching, training, monitoring and explaining a run.

``runs/<id>/`` contains everything about one run and works on any local or shared disk::

    run.json       id, name, creation time, layout version
    config.yaml    the resolved settings, secrets redacted
    job.json       the launched command, its hosts, the launcher process
    events.jsonl   what happened, from which the state is computed
    console.log    output of the launcher
    logs/          rank-<n>.log
    model/         model files other than weights: config, tokenizer
    base-model.json  hashes of the weight files that a LoRA run began with
    metrics/  checkpoints/  hang/
    report.html
"""

import contextlib
import errno
import json
import os
import re
import shlex
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torchmuster import untrusted
from torchmuster.errors import Impossible, NoSuchRun

LAYOUT_VERSION = 1
DEFAULT_ROOT = Path("runs")
_PARTS = ("logs", "metrics", "checkpoints", "hang")
_TIME = re.compile(r"\d{8}-\d{6}(?=-)")
# Errors of a disk that cannot be written: full, over quota, file too large, I/O error.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, from :func:`create_run_folder` or :func:`find_run`."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id: the folder's name."""
        return self.path.name

    @property
    def reference(self) -> str:
        """How a pasted command finds the run: by its id if it is in ``runs`` here, else by its folder."""
        if self.path.resolve().parent == DEFAULT_ROOT.resolve():
            return self.id
        return shlex.quote(str(self.path))

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
        """The launched command, its hosts and the launcher process."""
        return self.path / "job.json"

    @property
    def events(self) -> Path:
        """What happened to the run, from which its state is computed."""
        return self.path / "events.jsonl"

    @property
    def console(self) -> Path:
        """The output of the launcher."""
        return self.path / "console.log"

    @property
    def logs(self) -> Path:
        """One log file per rank."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """The metrics of the ranks."""
        return self.path / "metrics"

    @property
    def model(self) -> Path:
        """Model files other than weights: config, tokenizer."""
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
        """The HTML report written at the end of the run."""
        return self.path / "report.html"

    def rank_log(self, rank: int) -> Path:
        """Return the path of one rank's log."""
        return self.logs / f"rank-{rank}.log"


def create_run_folder(
    root: Path, name: str, *, now: datetime | None = None, run_id: str | None = None
) -> RunFolder:
    """Create a run folder below ``root``, with this id; by default its id starts with the time, so ids sort by age."""
    now = now or datetime.now(UTC)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "run"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if run_id is None:
            run = _new_folder(root, f"{now:%Y%m%d-%H%M%S}-{slug}")
        else:  # it may be incomplete: its creator may have been killed
            run = RunFolder(root / run_id)
        for part in _PARTS:
            (run.path / part).mkdir(parents=True, exist_ok=True)
        marker = {"id": run.id, "name": name, "created": now.isoformat(), "layout": LAYOUT_VERSION}
        write_atomically(run.marker, json.dumps(marker, indent=2) + "\n")
    except OSError as error:
        raise Impossible(
            f"cannot create a run folder in {root}",
            why=error.strerror or str(error),
            fix="use a writable folder on a disk with free space",
        ) from error
    return run


def _new_folder(root: Path, stem: str) -> RunFolder:
    while True:
        run = RunFolder(root / f"{stem}-{os.urandom(2).hex()}")
        try:
            run.path.mkdir()
        except FileExistsError:
            continue  # same name, second and random suffix: try again
        return run


def list_runs(root: Path) -> list[RunFolder]:
    """Return every run below ``root``, newest first."""
    if not root.is_dir():
        return []
    found: list[tuple[str, float, RunFolder]] = []
    for path in root.iterdir():
        run = RunFolder(path)
        with contextlib.suppress(OSError):  # deleted meanwhile, or of a user who shows it to nobody
            marker = run.marker.stat()
            if stat.S_ISREG(marker.st_mode):
                found.append((_age(run, marker.st_mtime), marker.st_mtime, run))
    found.sort(key=lambda candidate: candidate[:2], reverse=True)
    return [run for _, _, run in found]


def _age(run: RunFolder, written: float) -> str:
    """Return the time in a run's id; for an id that a scheduler gave, when its marker was written."""
    in_id = _TIME.match(run.id)
    return in_id[0] if in_id else f"{datetime.fromtimestamp(written, UTC):%Y%m%d-%H%M%S}"


def run_name(run: RunFolder) -> str:
    """Return the name that a run was created with."""
    try:
        return str(untrusted.read_json(run.marker)["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return run.id


def find_run(run: str | Path, root: Path = DEFAULT_ROOT) -> RunFolder:
    """Find a run by folder, id or unique part of an id."""
    given = RunFolder(Path(run).resolve())  # so that "." has a name as well
    if given.marker.is_file():
        return given
    known = list_runs(root)
    matches = [candidate for candidate in known if str(run) == candidate.id] or [
        candidate for candidate in known if str(run) in candidate.id
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NoSuchRun(
            f"run {str(run)!r} is not unique",
            why="it could be any of: " + ", ".join(candidate.id for candidate in matches[:5]),
            fix="give a longer part of the id, or the folder's path",
        )
    newest = ", ".join(candidate.id for candidate in known[:5])
    raise NoSuchRun(
        f"there is no run {str(run)!r}",
        why=f"the newest runs in {root} are: {newest}" if known else f"{root} contains no runs",
        fix="pass a run's id or its folder, or last for the newest run",
    )


def refuse_foreign(run: RunFolder, action: str) -> None:
    """Refuse to act on a run folder that another user controls, also as root.

    Its files name processes, jobs and tokens, and its links may lead anywhere, so acting on it would lend the caller's
    rights to its owner. Called before any signal to a process of the run and before any write into its folder. A folder that
    its owner lets others write to is not recognized, unless they replace ``job.json``.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return
    own = os.geteuid()
    try:
        owners = {run.path: run.path.stat().st_uid}
        with contextlib.suppress(FileNotFoundError):
            owners[run.job] = run.job.lstat().st_uid  # a link is as good as the user who made it
    except OSError as error:
        raise Impossible(f"refusing to {action} {run.id}", why=str(error)) from error
    for path, uid in owners.items():
        if uid != own:
            owner = _user_name(uid)
            raise Impossible(
                f"refusing to {action} {run.id}",
                why=f"{path}: it belongs to {owner}, and you are {_user_name(own)}; "
                "a run folder of another user may name any process and any file",
                fix=f"ask {owner}, or copy the folder and use the copy",
            )


def _user_name(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return f"user {uid}"


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file so that a reader, or a crash, sees either the old content or the new.

    ``durable`` calls fsync, which takes time; files that may be lost in a power failure (a cache)
    do not need it.
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
