"""What a trial of ``muster prove`` may not do; in a process of its own, because Landlock stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.prove import caches, landlock

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROGRAM = """\
import os, shutil, subprocess, sys
import torch
from torchmuster.prove.probes import isolation
from safetensors.torch import save_file
inside, outside = sys.argv[1:]
isolation.allow_writes_only([inside])
tensor = {"a": torch.zeros(1)}

def refused(call):
    try:
        call()
    except Exception as error:
        return "refused" if any(text in str(error) for text in REFUSALS) else repr(error)
    return "written"

attempts = {
    "open": lambda folder: open(f"{folder}/text", "w").close(),
    "append": lambda folder: open(f"{folder}/kept", "a").close(),
    "truncate": lambda folder: os.truncate(f"{folder}/kept", 1),
    "os.open": lambda folder: os.close(os.open(f"{folder}/raw", os.O_WRONLY | os.O_CREAT)),
    "torch.save": lambda folder: torch.save(tensor, f"{folder}/a.pt"),
    "safetensors": lambda folder: save_file(tensor, f"{folder}/a.safetensors"),
    "mkdir": lambda folder: os.makedirs(f"{folder}/new"),
    "rename": lambda folder: os.rename(f"{folder}/kept", f"{folder}/other"),
    "remove": lambda folder: os.remove(f"{folder}/gone"),
    "rmtree": lambda folder: shutil.rmtree(f"{folder}/folder"),
    "hard link": lambda folder: os.link(f"{folder}/linked", f"{inside}/{os.path.basename(folder)}"),
}
from torchmuster.prove.trials import _REFUSALS as REFUSALS
for name, attempt in attempts.items():
    print(name, refused(lambda: attempt(inside)), refused(lambda: attempt(outside)))
os.symlink(outside, f"{inside}/link")
print("link", "written", refused(lambda: open(f"{inside}/link/text", "w")))
subprocess.run([sys.executable, "-c", f"open({outside!r} + '/by-a-child', 'w')"], capture_output=True)
open(f"{outside}/kept").read()
os.makedirs(outside, exist_ok=True)
"""


@pytest.mark.skipif(not landlock.is_available(), reason="this kernel has no Landlock")
def test_writes_outside_are_refused_and_reads_are_not(tmp_path: Path) -> None:
    folders = [tmp_path / "inside", tmp_path / "outside"]
    for folder in folders:
        folder.mkdir()
        (folder / "kept").write_text("kept")
        (folder / "gone").touch()
        (folder / "linked").touch()
        (folder / "folder").mkdir()
        (folder / "folder" / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        env={"TMPDIR": str(tmp_path / "inside"), "HOME": str(tmp_path / "home"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert [row for row in rows if row[1:] != ["written", "refused"]] == []
    left = sorted(path.name for path in folders[1].rglob("*"))
    assert left == ["file", "folder", "gone", "kept", "linked"]
    assert (folders[1] / "kept").read_text() == "kept"
    assert not (tmp_path / "home").exists()


def test_a_cache_that_does_not_exist_is_moved_and_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.endswith(("CACHE", "CACHE_HOME", "_HOME"))]:
        monkeypatch.delenv(name)
    (tmp_path / ".triton").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    moved = caches.moved_caches("/tmp/proof")
    assert moved["XDG_CACHE_HOME"] == "/tmp/proof/XDG_CACHE_HOME"
    assert moved["HF_HOME"] == "/tmp/proof/HF_HOME"
    assert "TRITON_CACHE_DIR" not in moved
    assert [path.name for path in tmp_path.iterdir()] == [".triton"]


UPLOADS = """\
import torchmuster.prove.probes.before_libraries
from huggingface_hub import HfApi, create_repo, upload_folder
print(create_repo(repo_id="me/model").repo_id)
upload_folder(repo_id="me/model", folder_path=".")
HfApi().upload_file(repo_id="me/model", path_or_fileobj=b"", path_in_repo="x")
"""


def test_uploads_to_the_hub_are_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPLOADS], capture_output=True, text=True, timeout=GIVE_UP_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "me/model\n"
    blocked = [line.split()[3] for line in done.stderr.splitlines() if "blocked" in line]
    assert blocked == ["create_repo", "upload_folder", "upload_file"]
