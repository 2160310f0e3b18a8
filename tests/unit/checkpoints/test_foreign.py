"""Checkpoints of others: whole ones are complete, and whatever is cut or missing is named."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from script_checkpoints import accelerate_folder, cut, safetensors_file, torch_file, trainer_folder
from torchmuster.checkpoints.foreign import (
    Completeness,
    condition_of,
    file_problem,
    sizes_in_metadata,
)

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
    assert file_problem(path) == ""
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
        assert file_problem(tmp_path / name) == ""
    assert file_problem(safetensors_file(tmp_path / "new.safetensors", dtype="F4_OF_2030")) == ""


@pytest.mark.parametrize(
    "missing",
    ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"],
)
def test_a_missing_file_of_a_trainer_is_named(tmp_path: Path, missing: str) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    (folder / missing).unlink()
    found = condition_of(str(folder), "transformers")
    assert found.state is TORN
    assert ("weights" if missing == "model.safetensors" else missing) in found.why


@pytest.mark.parametrize(
    "torn", ["trainer_state.json", "model.safetensors", "optimizer.pt", "rng_state_1.pth"]
)
def test_a_file_of_a_trainer_that_was_cut_is_named(tmp_path: Path, torn: str) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    cut(folder / torn)
    found = condition_of(str(folder), "transformers")
    assert found.state is TORN
    assert torn in found.why


def test_a_checkpoint_of_the_model_alone_is_complete(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (folder / name).unlink()
    assert condition_of(str(folder), "transformers").state is COMPLETE


def test_a_missing_shard_of_a_model_is_named(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    found = condition_of(str(folder), "transformers")
    assert found.state is TORN
    assert "model-00002-of-00003.safetensors" in found.why
    cut(folder / "model.safetensors.index.json")
    assert "index.json" in condition_of(str(folder), "transformers").why


def test_a_folder_that_the_trainer_is_still_writing_is_torn(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-40")
    (folder / "checkpoint-is-incomplete.txt").touch()
    assert condition_of(str(folder), "transformers").state is TORN


@pytest.mark.parametrize("rank", [0, 1])
def test_random_states_of_each_rank_belong_to_a_state_of_accelerate(
    tmp_path: Path, rank: int
) -> None:
    folder = accelerate_folder(tmp_path / "step_40", ranks=3)
    (folder / f"random_states_{rank}.pkl").unlink()
    found = condition_of(str(folder), "accelerate")
    assert found.state is TORN
    assert f"random_states_{rank}.pkl" in found.why


class _StorageInfo:
    """Written to a pickle as DCP's own class is."""

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path = relative_path
        self.offset = offset
        self.length = length


def _sharded(folder: Path, *, protocol: int = 4) -> Path:
    """Write a checkpoint as DCP does, of two ranks."""
    folder.mkdir()
    infos = [_StorageInfo(f"__{n % 2}_0.distcp", 100 * n, 100) for n in range(6)]
    (folder / ".metadata").write_bytes(pickle.dumps({"infos": infos, 7: None}, protocol))
    for n in range(2):
        (folder / f"__{n}_0.distcp").write_bytes(bytes([1]) * 700)
    return folder


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_sizes_of_shards_are_read_from_a_pickle_that_is_not_loaded(
    tmp_path: Path, protocol: int
) -> None:
    data = (_sharded(tmp_path / "dcp", protocol=protocol) / ".metadata").read_bytes()
    assert sizes_in_metadata(data) == {"__0_0.distcp": 500, "__1_0.distcp": 600}
    for end in range(len(data)):
        with pytest.raises(ValueError):  # noqa: PT011
            sizes_in_metadata(data[:end])


def test_a_pickle_that_would_run_a_program_runs_none(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    folder = _sharded(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert condition_of(str(folder), "DCP").state is COMPLETE
    assert not (tmp_path / "ran").exists()


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


def test_a_shard_that_is_missing_or_too_short_is_named(tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "dcp")
    cut(folder / "__1_0.distcp")
    found = condition_of(str(folder), "DCP")
    assert found.state is TORN
    assert found.why.startswith("__1_0.distcp is truncated")
    (folder / "__1_0.distcp").unlink()
    assert condition_of(str(folder), "DCP").why == "__1_0.distcp is missing"


def test_what_is_not_here_is_not_called_torn(tmp_path: Path) -> None:
    assert condition_of(str(tmp_path / "gone"), "transformers").state is Completeness.MISSING
    assert condition_of("s3://bucket/last.ckpt", "lightning").state is Completeness.UNKNOWN
    (tmp_path / "empty").mkdir()
    assert condition_of(str(tmp_path / "empty"), "DCP").state is TORN


def test_what_takes_too_long_to_check_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a checkpoint is from a run's records: it may be that of any folder, such as /."""
    folder = trainer_folder(tmp_path / "checkpoint-40", shards=3)
    for limit in ("_MOST_FILES", "_MOST_JSON_BYTES"):
        with monkeypatch.context() as changed:
            changed.setattr(f"torchmuster.checkpoints.foreign.{limit}", 5)
            found = condition_of(str(folder), "transformers")
        assert found.state is Completeness.UNKNOWN
        assert "more than 5 files" in found.why or "larger than 5 bytes" in found.why
    assert condition_of(str(folder), "transformers").state is COMPLETE


def test_a_description_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"1")
    os.mkfifo(tmp_path / ".metadata")
    assert condition_of(str(tmp_path), "DCP").state is TORN
