"""A run folder whose files are hostile: every command still shows the other runs, within bounds of memory and time."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from made_up_runs import add_event, add_lines, add_ranks, set_state
from muster_command import muster_argv
from patience import GIVE_UP_S
from torchmuster.launch.history import run_state
from torchmuster.runfolder import RunFolder, create_run_folder

pytestmark = pytest.mark.slow

DEEP = b"[" * 100_000
MOST_MEMORY_BYTES = 400 * 2**20  # of address space, beyond what an empty folder needs
GIB = 2**30


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(3 * GIB // 2)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "deep": content(DEEP + b"\n"),
    "deep-object": content(b'{"a":' * 50_000 + b"\n"),
    "deep-but-valid": content(b"[" * 900 + b"]" * 900 + b"\n"),
    "sparse": sparse,
    "fifo": fifo,
    "not-utf-8": content(b"\xff\xfe{}\n"),
    "huge-numbers": content(b'{"at_unix_s": 1e999, "step": 1e999, "event": "running"}\n'),
    "huge-integers": content(b'{"at_unix_s": 1%s, "step": 1}\n' % (b"0" * 5000)),
    "surrogates": content(b'{"name": "\\ud800", "event": "\\ud800", "at_unix_s": 1e9}\n'),
    "list": content(b"[1, 2]\n"),
    "objects-in-lists": content(b'{"event": [{}], "at_unix_s": 2e9, "step": {"a": 1}}\n'),
    "lists-in-fields": content(
        b'{"phase": ["running"], "since_unix_s": 2e9, "started_unix_s": 2e9, "command": [1, {}], "folder": [],'
        b' "hosts": [[]], "launcher": {"host": [], "pid": "x", "start_s": []}, "token": [], "grace_s": 1,'
        b' "slurm_job": {}, "typed": [[1]], "flags": [{}]}\n'
    ),
}
FILES = (
    "run.json",
    "job.json",
    "events.jsonl",
    "metrics/steps.jsonl",
    "metrics/saves.jsonl",
    "metrics/evaluations.jsonl",
    "metrics/ranks/a/from-0.json",
    "metrics/sinks/mlflow.json",
    "checkpoints/step-1-abcd/manifest.json",
)


def a_good_run(root: Path, name: str = "good") -> RunFolder:
    now = time.time()
    run = create_run_folder(root, name)
    set_state(run, "running", now=now)
    add_lines(run, now=now)
    add_ranks(run, 2, now=now)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good run, and one for each hostile content of each file."""
    root = tmp_path_factory.mktemp("hostile") / "runs"
    for kind, write in HOSTILE.items():
        for file in FILES:
            run = a_good_run(root, f"{kind}-{Path(file).stem}")
            path = run.path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
    a_good_run(root)
    return root


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def muster(*words: str, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        muster_argv(words),
        cwd=where.parent,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        preexec_fn=limited,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "--all"),
        ("runs", "--all", "--json"),
        ("explain", "good"),
        ("watch", "good", "--once"),
        ("exporter", "--once"),
        ("logs", "good", "--rank", "0"),
    ],
    ids=" ".join,
)
def test_the_good_run_is_shown_next_to_hostile_ones(runs: Path, words: tuple[str, ...]) -> None:
    done = muster(*words, where=runs)
    assert "Traceback" not in done.stderr
    assert "good" in done.stdout + done.stderr
    if words[0] != "logs":  # there is no log
        assert done.returncode == 0, done.stderr


IN_ONE_PROCESS = """
import contextlib, io, json, sys, time
from torchmuster.cli.main import main
from torchmuster.runfolder import list_runs
from pathlib import Path
troubles = []
for run in list_runs(Path("runs")):
    for words in (["explain"], ["explain", "--json"], ["watch", "--once"], ["watch", "--report", "x.html"]):
        began = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                main([words[0], str(run.path), *words[1:]])
        except BaseException as error:
            troubles.append([run.id, words, repr(error)[:300]])
        if time.process_time() - began > 5:
            troubles.append([run.id, words, f"{time.process_time() - began:.1f} s"])
json.dump(troubles, sys.stdout)
"""


@pytest.mark.nightly
def test_a_hostile_run_itself_is_explained_and_watched(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        cwd=runs.parent,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        preexec_fn=limited,
    )
    assert json.loads(done.stdout) == [], done.stderr


def test_pipes_in_a_failed_run_are_not_waited_for(tmp_path: Path) -> None:
    """Its logs, settings and script are only read once it has failed, or for a report."""
    root = tmp_path / "runs"
    for phase in ("failed", "running"):  # the launcher of the second one is gone
        run = a_good_run(root, phase)
        set_state(run, phase, now=time.time())
        script = run.path / "script.py"
        for path in (run.config, run.console, run.rank_log(0), script):
            fifo(path)
        launcher = {"host": os.uname().nodename, "pid": 2**22 + 1, "start_s": 1.0}
        job: dict[str, object] = {
            "command": [script.name],
            "folder": str(run.path),
            "hosts": [],
            "token": "",
        }
        job |= {"launcher": launcher, "grace_s": 1, "slurm_job": None}
        run.job.write_text(json.dumps(job))
        saved = {"at_unix_s": 1.0, "step": 1, "path": str(run.path), "library": "transformers"}
        (run.metrics / "saves.jsonl").write_text(json.dumps(saved | {"files": 1}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert json.loads(done.stdout) == [], done.stderr


def test_a_folder_that_may_not_be_read_hides_no_other_run(tmp_path: Path) -> None:
    from torchmuster.runfolder import list_runs

    good = a_good_run(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    gone = a_good_run(tmp_path, "gone")
    gone.marker.unlink()
    gone.marker.symlink_to(gone.marker)
    assert [run.id for run in list_runs(tmp_path)] == [good.id]


def test_events_are_read_up_to_a_bad_line_and_after_it(tmp_path: Path) -> None:
    run = a_good_run(tmp_path)
    with (run.events).open("ab") as stream:
        stream.write(DEEP + b"\n")
    add_event(run, "finished", time.time())
    assert [event.name for event in run_state.read_events(run)] == [
        "launched",
        "running",
        "finished",
    ]


STEERING = set("\x1b\x07\x08\x7f\x9b\u202e")
HOSTILE_TEXT = "\x1b]0;owned\x07\x1b[2J\x9b2J\x08\x7f\u202egood"


@pytest.fixture(scope="module")
def steering_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another user, with escape sequences in its folder's name and in all texts."""
    root = tmp_path_factory.mktemp("steering") / "runs"
    made = create_run_folder(root, "x")
    run = RunFolder(made.path.rename(made.path.with_name(f"{made.id}{HOSTILE_TEXT}")))
    text, now = HOSTILE_TEXT, time.time()
    run.marker.write_text(json.dumps({"id": run.id, "name": text}))
    add_event(run, "failed", now, headline=text, what=text)
    launcher = {"host": text, "pid": 1, "start_s": 1.0}
    job = {"command": [text], "folder": text, "hosts": [text], "launcher": launcher, "token": ""}
    run.job.write_text(json.dumps({**job, "grace_s": 1, "slurm_job": None, "typed": [text]}))
    run.console.write_text(f"{text}\n{text}")
    run.rank_log(0).write_text(f"{text}\n")
    add_event(run, text, now, headline=text)
    add_event(run, run_state.RESTART, now, headline=text, reason=text)
    add_lines(run, now=now)
    saved = {"at_unix_s": now, "step": 1, "path": text, "library": text, "files": 1}
    (run.metrics / "saves.jsonl").write_text(json.dumps(saved) + "\n")
    add_ranks(run, 2, host=text, now=now)
    (run.path / f"{text}.txt").write_text("")
    return root


@pytest.mark.parametrize(
    "words",
    [
        ("runs",),
        ("runs", "--json"),
        ("explain", "last"),
        ("explain", "last", "--json"),
        ("watch", "last", "--once"),
        ("watch", "last"),
        ("exporter", "--once"),
        ("logs", "last"),
        ("logs", "last", "--rank", "0"),
        ("stop", "2"),
        ("stop", "no such run"),
        ("checkpoint", "list", "2"),
    ],
    ids=" ".join,
)
def test_no_text_of_a_run_controls_the_terminal(steering_run: Path, words: tuple[str, ...]) -> None:
    done = muster(*words, where=steering_run)
    assert "Traceback" not in done.stderr
    assert not STEERING & set(done.stdout + done.stderr)
    assert (done.stdout + done.stderr).strip()
