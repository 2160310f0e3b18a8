"""What a trial of ``muster prove`` may not do; in a process of its own, because hooks stay."""

import subprocess
import sys
from pathlib import Path

import pytest

from patience import GIVE_UP_S

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROGRAM = """\
import os, shutil, sys
import torch
import torchmuster.prove.probes.before_libraries
from torchmuster.prove.probes import isolation
from safetensors.torch import save_file  # as libraries import it
inside, outside = sys.argv[1:]
isolation.allow_writes_only([inside])
tensor = {"a": torch.zeros(1)}

def refused(call):
    try:
        call()
    except isolation.WriteOutside:
        return True
    return False

attempts = {
    "open": lambda folder: open(f"{folder}/text", "w").close(),
    "append": lambda folder: open(f"{folder}/kept", "a").close(),
    "os.open": lambda folder: os.close(os.open(f"{folder}/raw", os.O_WRONLY | os.O_CREAT)),
    "torch.save": lambda folder: torch.save(tensor, f"{folder}/a.pt"),
    "safetensors": lambda folder: save_file(tensor, f"{folder}/a.safetensors"),
    "mkdir": lambda folder: os.makedirs(f"{folder}/new"),
    "rename": lambda folder: os.rename(f"{folder}/kept", f"{folder}/other"),
    "remove": lambda folder: os.remove(f"{folder}/gone"),
    "rmtree": lambda folder: shutil.rmtree(f"{folder}/folder"),
    "hard link": lambda folder: os.link(f"{folder}/linked", f"{inside}/{os.path.basename(folder)}"),
}
for name, attempt in attempts.items():
    print(name, refused(lambda: attempt(inside)), refused(lambda: attempt(outside)))
os.symlink(outside, f"{inside}/link")
print("link", False, refused(lambda: open(f"{inside}/link/text", "w")))
open(f"{outside}/kept").read()
os.makedirs(outside, exist_ok=True)
"""


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
    assert [(name, inside, outside) for name, inside, outside in rows] == [
        (name, "False", "True")
        for name in (
            *("open", "append", "os.open", "torch.save", "safetensors"),
            *("mkdir", "rename", "remove", "rmtree", "hard link", "link"),
        )
    ]
    left = sorted(path.name for path in folders[1].rglob("*"))
    assert left == ["file", "folder", "gone", "kept", "linked"]


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
