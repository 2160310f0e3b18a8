"""Saving and loading on real ranks: exactness on any number of them, failures, damage, room."""

import os
import subprocess
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from rank_group import RunRanks
from rank_programs import saving

pytestmark = pytest.mark.ranks


def test_what_some_ranks_save_any_number_reads_bit_by_bit(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    digests: dict[str, str] = {}
    for ranks, places, saves in (
        (2, [], ["ddp", "fsdp"]),
        (4, ["fsdp-2", "ddp-2"], ["fsdp", "hybrid"]),
        (3, ["fsdp-4", "ddp-2"], []),
        (1, ["fsdp-4", "hybrid-4", "ddp-2"], ["single"]),
        (2, ["single-1", "fsdp-4", "hybrid-4", "fsdp-2", "ddp-2"], []),
        (4, ["hybrid-4", "single-1"], []),
    ):
        told = run_ranks(saving.relay, ranks, tmp_path, places, saves)
        assert all(one == told[0] for one in told)
        read, saved = told[0]
        digests |= saved
        assert len(read) == (3 if ranks == 4 else 2) * len(places)
        for case, (digest, step, has_own, progress) in read.items():
            place = case.split()[0]
            assert digest == digests[place], case
            assert step == 3
            assert has_own == place.endswith(f"-{ranks}"), case
            assert progress == (
                "{'step': 3, 'odd': {'inf': inf, 'pair': (1, 0.1), 'by step': {3: 'three'}}, "
                "'none': None, 'yes': True}"
            )


@pytest.mark.nightly
def test_states_on_any_mesh_are_saved_and_loaded_on_another(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(saving.on_meshes, 4, tmp_path) == [[]] * 4


def test_saves_that_fail_or_are_slow_leave_the_training_going(
    run_ranks: RunRanks, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    result, other = run_ranks(saving.go_wrong, 2, tmp_path)
    assert result["nothing yet"] is None
    first, second, third = result["problems"]
    assert first.startswith("rank 1: ")
    assert second.startswith("rank 0: ")
    for problem in (first, second):
        assert "No space left on device" in problem
    assert third is None
    assert other["problems"] == result["problems"]  # all ranks hear the same
    assert result["left"] == [1, 1, 2]  # of a save that failed nothing is left
    for of_rank in (result, other):
        assert of_rank["went on"] == (True, True)
        assert of_rank["waited"]
        assert of_rank["as it was"] == (True, True)
        assert of_rank["steps"] == [1, 2, 3, 4, 4, 7]
    assert result["kept"] == [7, 4]
    sizes = result["files"]
    assert sorted(sizes) == [
        "manifest.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    _, own, others = (sizes[file] for file in sorted(sizes))
    assert 0.5 < own / others < 2  # what both have is divided between them
    # Each rank's BatchNorm has seen other samples; rank 0's is the run's.
    assert result["buffers are in"] == {"shard-00001-model-00001-of-00001.safetensors"}
    shapes, optimizer, kind, missing = result["misfits"]
    for fact in ("model.embedding.weight", "[11, 6]", "[11, 7]"):
        assert fact in shapes
    assert "optimizer.state.embedding.weight.exp_avg is in the checkpoint" in optimizer
    for fact in ("model.layers.0.bias", "float32", "float16"):
        assert fact in kind
    assert "model.another" in missing
    assert result["misfits"] == snapshot
    a_set, a_complex = result["unsupported"]
    assert a_set.startswith("model.it ")
    assert "torch.complex128" in a_complex
    assert result["unsupported"] == snapshot


def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_is_used(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    for wrong in run_ranks(saving.damage_each, 2, tmp_path, canary):
        assert wrong == []
    assert not canary.exists()


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_full_disk_fails_a_save_and_nothing_else(run_ranks: RunRanks, tmp_path: Path) -> None:
    mounted = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this container may not mount file systems")
    try:
        answers = run_ranks(saving.fill_disk, 2, tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert answers[0] == answers[1]
    (good, one), (bad, still_one), (good_again, two) = answers[0]
    assert (good, good_again) == (None, None)
    assert "No space left on device" in bad
    assert (one, still_one, two) == (1, 1, 2)


def test_a_mount_that_is_lost_fails_a_save_and_nothing_else(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    results = run_ranks(saving.lose_mount, 2, tmp_path)
    assert results[0] == results[1]
    good, (problem, count), good_again = results[0]
    assert good == (None, 1)
    assert problem is not None
    assert "NotADirectoryError" in problem
    assert count == 1
    assert good_again == (None, 2)


def test_folders_that_hosts_do_not_share_are_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    for said, problem, left in run_ranks(saving.on_disks_of_their_own, 2, tmp_path):
        assert "rank 1 does not see rank 0's" in said
        assert "save to a folder that all hosts share" in problem
        assert left[0] == []  # what can never be a checkpoint is not kept
