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
        (2, [], [("ddp", "async"), ("fsdp", "async")]),
        (4, ["fsdp-2", "ddp-2"], [("fsdp", "sync")]),
        (3, ["fsdp-4", "ddp-2"], []),
        (1, ["fsdp-4", "ddp-2"], [("single", "async")]),
        (2, ["single-1", "fsdp-4", "fsdp-2", "ddp-2"], []),
    ):
        told = run_ranks(saving.relay, ranks, tmp_path, places, saves)
        assert all(one == told[0] for one in told)
        read, saved = told[0]
        digests |= saved
        assert len(read) == 2 * len(places)
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
    found, other = run_ranks(saving.go_wrong, 2, tmp_path)
    assert found["nothing yet"] is None
    first, second, third = found["problems"]
    where = f"{tmp_path}/shared/step-"
    assert first.startswith("rank 1: cannot write rank-00001.safetensors ")
    assert second.startswith("rank 0: cannot write manifest.json ")
    for one in (first, second):
        assert where in one
        assert "No space left on device" in one
    assert third == ""
    assert [first, second] == snapshot
    assert other["problems"] == found["problems"]  # all ranks hear the same
    assert found["left"] == [1, 1, 2]  # of a save that failed nothing is left
    for one in (found, other):
        assert one["went on"] == (True, True)
        assert one["waited"]
        assert one["as it was"] == (True, True)
        assert one["steps"] == [1, 2, 3, 4, 4, 7]
    assert found["kept"] == [7, 4]
    sizes = found["files"]
    assert sorted(sizes) == [
        "index.json",
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
        "rank-00001.json",
        "rank-00001.safetensors",
        "state.json",
    ]
    own, others = sizes["rank-00000.safetensors"], sizes["rank-00001.safetensors"]
    assert 0.7 < own / others < 1.4  # what both have is divided between them
    # Each rank's BatchNorm has seen other samples; rank 0's is the run's.
    assert found["buffers are in"] == {"rank-00000.safetensors"}
    shapes, optimizer, kind, missing = found["misfits"]
    for fact in ("model.embedding.weight", "[11, 6]", "[11, 7]"):
        assert fact in shapes
    for fact in ("exp_avg, exp_avg_sq, step", "momentum_buffer"):
        assert fact in optimizer
    for fact in ("model.layers.0.bias", "float32", "float16"):
        assert fact in kind
    assert "model.another" in missing
    assert found["misfits"] == snapshot
    a_set, a_complex = found["unkeepable"]
    assert a_set.startswith("model.it ")
    assert "torch.complex128" in a_complex
    assert found["unkeepable"] == snapshot


def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_is_used(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    for wrong in run_ranks(saving.damage_each, 2, tmp_path, canary):
        assert wrong == []
    assert not canary.exists()


@pytest.mark.nightly
def test_room_is_looked_for_and_decides_how_to_save(
    run_ranks: RunRanks, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    found, other = run_ranks(saving.room_and_mode, 2, tmp_path)
    assert other == found
    mode, said = found["much auto"]
    assert (mode.value, said) == ("async", [])
    assert "2 ranks" in mode.reason
    assert mode.reason == snapshot
    mode, said = found["little auto"]
    assert (mode.value, said) == ("sync", [])
    assert "2.0 KiB of 3.9 KiB" in mode.reason
    assert mode.reason == snapshot
    assert found["sync stalls"]
    mode, said = found["little async"]
    assert mode.value == "async"
    assert said == snapshot
    (apart,), problem, left = found["not shared"]
    assert apart.status.value == "failure"
    assert "rank 1 " in apart.what
    assert f"{tmp_path}/of-0/saves" in apart.why
    assert apart == snapshot
    assert problem[-1] == apart.fix
    assert left == [[], []]  # neither machine keeps what can never be a checkpoint
    assert found["left"] == []  # nor what a killed save left
    (warning,) = found["one fits"]
    assert warning.status.value == "warning"
    assert "4 checkpoints" in warning.what
    assert f"{tmp_path}/empty" in warning.what
    assert " 5 exist " in warning.why  # while one is saved
    assert "9.8 KiB" in warning.why
    assert warning == snapshot
    (failure,) = found["none fits"]
    assert failure.status.value == "failure"
    assert f"{tmp_path}/empty" in failure.what
    assert failure == snapshot


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_full_disk_fails_a_save_and_nothing_else(
    run_ranks: RunRanks, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    mounted = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this container may not mount file systems")
    try:
        answers = run_ranks(saving.fill_disk, 2, tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert answers[0] == answers[1]
    (good, one), (bad, still_one), (good_again, two) = answers[0]
    assert (good, good_again) == ("", "")
    *_, why, fix = bad.split("; ")
    assert why == "No space left on device"
    assert fix.partition(" (and ")[0] == snapshot  # both may have failed
    assert (one, still_one, two) == (1, 1, 2)


@pytest.mark.nightly
def test_a_service_that_is_lost_fails_a_save_and_nothing_else(
    run_ranks: RunRanks, snapshot: SnapshotAssertion
) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    answers = run_ranks(saving.lose_service, 2)
    assert answers[0] == answers[1]
    good, (bad, kept), good_again = answers[0]
    assert good == ("", [1])
    assert bad.startswith("rank 0: cannot access s3://bucket/run")
    what, *_, fix = bad.split("; ")
    assert [what, fix.partition(" (and ")[0]] == snapshot  # both may have failed
    assert "made-up-secret" not in bad
    assert kept == []  # it kept everything in its memory
    assert good_again == ("", [5])
