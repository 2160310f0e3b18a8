"""Checkpoints of others: whole ones are complete, and whatever is cut or missing is named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from script_checkpoints import accelerate_folder, cut, safetensors_file, torch_file, trainer_folder
from torchmuster.checkpoints.foreign import Completeness, condition_of, file_problem

COMPLETE, TORN = Completeness.COMPLETE, Completeness.TORN


@pytest.mark.parametrize(
    ("library", "write"),
    [
        ("torch.save", lambda folder: torch_file(folder / "last.pt")),
        ("lightning", lambda folder: torch_file(folder / "epoch=0-step=10.ckpt")),
        ("transformers", lambda folder: trainer_folder(folder / "checkpoint-40")),
        ("transformers", lambda folder: trainer_folder(folder / "checkpoint-40", ranks=1)),
        ("transformers", lambda folder: trainer_folder(folder / "checkpoint-40", shards=3)),
        ("accelerate", lambda folder: accelerate_folder(folder / "step_40")),
    ],
)
def test_what_is_whole_is_complete(
    tmp_path: Path, library: str, write: Callable[[Path], Path]
) -> None:
    found = condition_of(str(write(tmp_path)), library)
    assert (found.state, found.why) == (COMPLETE, "")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("write", [torch_file, safetensors_file])
def test_a_file_that_was_cut_is_torn(
    tmp_path: Path, write: Callable[[Path], Path], share: float
) -> None:
    suffix = ".pt" if write is torch_file else ".safetensors"
    path = write(tmp_path / f"model{suffix}")
    assert file_problem(path) is None
    cut(path, share)
    assert file_problem(path).startswith(f"model{suffix} ")


def test_a_file_of_which_the_disk_kept_only_the_size_is_torn(tmp_path: Path) -> None:
    """After a power loss, some file systems keep a file's length without its content."""
    path = torch_file(tmp_path / "model.pt")
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    assert "zeros" in file_problem(path)
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert "truncated" in file_problem(path)


def test_files_that_nothing_is_known_about_are_not_judged(tmp_path: Path) -> None:
    for name, content in (
        ("old.pt", b"\x80\x02\x8a\nl\xfc"),
        ("notes.txt", b"x"),
        ("a.bin", b"ab"),
    ):
        (tmp_path / name).write_bytes(content)
        assert file_problem(tmp_path / name) is None
    assert file_problem(safetensors_file(tmp_path / "new.safetensors", dtype="F4_OF_2030")) is None


def test_a_missing_state_of_a_trainer_which_is_written_last_is_named(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    (folder / "trainer_state.json").unlink()
    found = condition_of(str(folder), "transformers")
    assert found.state is TORN
    assert "trainer_state.json" in found.why


@pytest.mark.parametrize(
    "torn", ["trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state_1.pth"]
)
def test_a_file_of_a_trainer_that_was_cut_is_named(tmp_path: Path, torn: str) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    cut(folder / torn)
    found = condition_of(str(folder), "transformers")
    assert found.state is TORN
    assert torn in found.why


def test_a_folder_that_the_trainer_is_still_writing_is_torn(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    (folder / "checkpoint-is-incomplete.txt").touch()
    assert condition_of(str(folder), "transformers").state is TORN


def _sharded(folder: Path) -> Path:
    """Write a checkpoint as DCP does, of two ranks."""
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"never read")
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(b"1" * 700)
    return folder


@pytest.mark.parametrize("library", ["DCP", "lightning", "accelerate"])
def test_shards_without_their_description_are_torn(tmp_path: Path, library: str) -> None:
    folder = _sharded(tmp_path / "dcp")
    torch_file(folder / "meta.pt")
    torch_file(folder / "random_states_0.pkl")
    assert condition_of(str(folder), library).state is COMPLETE
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    found = condition_of(str(folder), library)
    assert found.state is TORN
    assert ".metadata is missing" in found.why


def test_what_is_not_here_is_not_called_torn(tmp_path: Path) -> None:
    assert condition_of(str(tmp_path / "gone"), "transformers").state is Completeness.MISSING
    assert condition_of("s3://bucket/last.ckpt", "lightning").state is Completeness.UNKNOWN
    (tmp_path / "empty").mkdir()
    assert condition_of(str(tmp_path / "empty"), "DCP").state is TORN


def test_a_description_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"1")
    os.mkfifo(tmp_path / ".metadata")
    assert condition_of(str(tmp_path), "DCP").state is TORN
