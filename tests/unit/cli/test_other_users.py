"""Run folders and claims of other users, tried as real Unix users: nobody's rights are lent to a folder's owner."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from made_up_runs import add_event
from patience import GIVE_UP_S
from torchmuster.launch.history.run_state import Launcher, _start_s
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE
from torchmuster.runfolder import RunFolder, create_run_folder

pytestmark = [
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="becoming other users needs root"
    ),
    pytest.mark.slow,
]
ROOT, ALICE, BOB, NOBODY = 0, 42001, 42002, 65534
# A test stops all processes of root with it, and other workers must not have the same.
TOKEN = os.urandom(16).hex()


# Python may be installed where other users have no access, such as /root: a private mount opens it to them.
_OPENED = 'mount --bind "$1" "$2" && shift 2 && exec setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups "$@"'


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all users may enter and write, as /tmp; pytest's own are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="users-", dir="/tmp"))
    made.chmod(0o1777)
    for name in ("python", "bin"):
        (made / name).mkdir(mode=0o755)
    yield made
    shutil.rmtree(made)


def start_as(uid: int, words: Sequence[str], where: Path, **more: str) -> subprocess.Popen[str]:
    """Start this Python as another user."""
    python = where / "python" / "bin" / f"python3.{sys.version_info.minor}"
    shell = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        _OPENED,
        "sh",
        sys.base_prefix,
        str(where / "python"),
    ]
    return subprocess.Popen(
        [*shell, str(python), *words],
        cwd=where,
        env={
            "PATH": f"{where / 'bin'}:{os.environ['PATH']}",
            "HOME": str(where),
            "USER_ID": str(uid),
            "PYTHONPATH": os.pathsep.join(one for one in sys.path if one),
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_as(
    uid: int, words: Sequence[str], where: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    with start_as(uid, words, where, **more) as child:
        out, err = child.communicate(timeout=GIVE_UP_S)
    return subprocess.CompletedProcess(words, child.returncode, out, err)


def muster_as(uid: int, *words: str, where: Path) -> subprocess.CompletedProcess[str]:
    return run_as(uid, ["-m", "torchmuster", *words], where)


@contextlib.contextmanager
def process_of(uid: int, where: Path, **environment: str) -> Iterator[psutil.Process]:
    """Run a process of a user that waits until it is killed."""
    code = "import os, time; print(os.getuid(), flush=True); time.sleep(600)"
    with start_as(uid, ["-c", code], where, **environment) as child:
        try:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == uid
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def a_run_of(
    uid: int, where: Path, process: psutil.Process | None = None, **changed: object
) -> RunFolder:
    """Make a running run in a user's folder whose launcher is said to be this process."""
    run = create_run_folder(where / "runs", "theirs")
    launcher = Launcher.this()
    launcher = Launcher(
        host=launcher.host,
        pid=process.pid if process else 2**22 + 1,
        start_s=_start_s(process.pid) if process else 1.0,
    )
    job = {
        "command": ["train.py"],
        "folder": str(where),
        "hosts": [],
        "launcher": msgspec.to_builtins(launcher),
        "token": "",
        "grace_s": 1.0,
        "slurm_job": None,
        "module": False,
        "typed": ["run"],
        "flags": [],
        "resume_with": [],
    }
    run.job.write_text(json.dumps(job | changed))
    add_event(run, "running", 2e9)
    for path in (where / "runs", run.path, *run.path.rglob("*")):
        os.chown(path, uid, uid)
    return run


@pytest.mark.parametrize("who", [ROOT, BOB], ids=["root", "another user"])
def test_stop_signals_no_process_that_a_folder_of_another_user_names(place: Path, who: int) -> None:
    with process_of(BOB, place) as victim:
        run = a_run_of(ALICE, place, victim)
        done = muster_as(who, "stop", str(run.path), where=place)
        assert done.returncode == 2, done.stderr
        assert lives(victim)
        assert "sudo" not in done.stderr


@pytest.mark.parametrize("who", [ROOT, BOB], ids=["root", "a user"])
def test_user_nobody_is_another_user(place: Path, who: int) -> None:
    """A file system may show a user's own files as nobody's, but this one does not."""
    with process_of(who, place, **{TOKEN_VARIABLE: TOKEN}) as victim:
        for run in (a_run_of(NOBODY, place, victim), a_run_of(NOBODY, place, token=TOKEN)):
            done = muster_as(who, "stop", str(run.path), where=place)
            assert done.returncode == 2, done.stderr
            assert lives(victim)


def test_stop_signals_no_process_of_another_user_that_an_own_folder_names(place: Path) -> None:
    with process_of(BOB, place) as victim:
        run = a_run_of(ROOT, place, victim)
        done = muster_as(ROOT, "stop", str(run.path), where=place)
        assert done.returncode == 2, done.stderr
        assert lives(victim)


def test_stop_kills_no_process_of_another_user_by_its_token(place: Path) -> None:
    with process_of(BOB, place, **{TOKEN_VARIABLE: TOKEN}) as victim:
        for owner in (ALICE, ROOT):
            run = a_run_of(owner, place, token=TOKEN)
            muster_as(ROOT, "stop", str(run.path), where=place)
            assert lives(victim)


@pytest.mark.parametrize(
    ("owner", "job"), [(ALICE, "123"), (ROOT, "--user=bob")], ids=["of another user", "a flag"]
)
def test_stop_cancels_no_slurm_job_for_another_user(place: Path, owner: int, job: str) -> None:
    scancel = place / "bin" / "scancel"
    scancel.write_text(f"#!/bin/sh\necho called >> {place}/called\n")
    scancel.chmod(0o755)
    launcher = {**msgspec.to_builtins(Launcher.this()), "host": "elsewhere"}
    run = a_run_of(owner, place, slurm_job=job, launcher=launcher)
    done = muster_as(ROOT, "stop", str(run.path), where=place)
    assert done.returncode != 0
    assert not (place / "called").exists()


def test_a_user_stops_an_own_run(place: Path) -> None:
    with process_of(ALICE, place) as own:
        run = a_run_of(ALICE, place, own)
        done = muster_as(ALICE, "stop", str(run.path), where=place)
        assert done.returncode == 0, done.stderr
        assert not lives(own)


def test_a_run_of_another_user_is_not_resumed(place: Path) -> None:
    run = a_run_of(ALICE, place)
    add_event(run, "stopped", 2e9)
    run.config.write_text("model: {build: 'm:f'}\n")
    done = muster_as(ROOT, "train", "--resume", str(run.path), where=place)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not run.console.exists()


def test_other_users_read_a_run_and_a_closed_one_hides_no_other(place: Path) -> None:
    run, closed = a_run_of(ALICE, place), a_run_of(ALICE, place)
    closed.path.chmod(0o700)
    done = muster_as(BOB, "runs", where=place)
    assert (done.returncode, run.id in done.stdout) == (0, True), done.stderr
    assert closed.id not in done.stdout


def test_a_claims_folder_that_is_a_link_of_another_user_is_refused(place: Path) -> None:
    private = place / "private"
    private.mkdir(mode=0o700)
    (place / "claims").symlink_to(private)
    os.lchown(place / "claims", ALICE, ALICE)
    code = (
        "import os; from torchmuster.devices.claims import Claims\n"
        "with Claims.here(os.environ).gate(): pass\n"
    )
    done = run_as(ROOT, ["-c", code], place, TORCHMUSTER_CLAIMS_DIR=str(place / "claims"))
    assert "Impossible" in done.stderr
    assert list(private.iterdir()) == []
