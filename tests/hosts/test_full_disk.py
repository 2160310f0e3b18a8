"""A disk that is full in the middle of a save: told in words, nothing of it is there, what was saved before is."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

PROGRAM = """
import sys
from pathlib import Path
from torchmuster.checkpoints.manifest import Manifest, commit_checkpoint, new_name, now_unix_s, write_file
from torchmuster.checkpoints.store import open_store
from torchmuster.checkpoints.verify import newest_good
from torchmuster.errors import MusterError

folder = Path(sys.argv[1])
store = open_store(folder)


def save(step, mebibytes):
    name = new_name(step)
    pieces = (bytes(2**20) for _ in range(mebibytes))
    try:
        files = {"rank-00000.safetensors": write_file(store, name, "rank-00000.safetensors", pieces)}
        manifest = Manifest(
            name=name, step=step, world_size=1, strategy="single", made_unix_s=now_unix_s(), files=files
        )
        commit_checkpoint(store, manifest)
    except MusterError as error:
        print(str(error).replace(name, "NAME").replace(str(folder), "FOLDER"))
        print("left:", [one.name for one in (folder / name).iterdir()])
        store.delete(name)
    print("newest:", newest_good(store).manifest.step, "free:", store.free_bytes() // 2**20)


save(10, 3)
save(20, 6)
save(30, 3)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """The small file system is in a mount namespace, and goes with the program."""
    mount = f"mount -t tmpfs -o size=8m tmpfs {tmp_path} && exec {sys.executable} - {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount],
        input=PROGRAM,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    first, what, why, fix, *after = done.stdout.splitlines()
    assert "rank-00000.safetensors" in what
    assert "FOLDER/NAME" in what
    assert why == "No space left on device"
    assert fix
    assert [first, *after] == [
        "newest: 10 free: 4",
        "left: []",
        "newest: 10 free: 4",
        "newest: 30 free: 1",
    ]
