"""Saving and loading on real ranks: exactness on any number of them, failures, damage, room."""

import os
import subprocess
from pathlib import Path

import pytest

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


def test_saves_that_fail_or_are_slow_leave_the_training_going(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    found, other = run_ranks(saving.go_wrong, 2, tmp_path)
    assert found["nothing yet"] is None
    first, second, third = found["problems"]
    where = f"{tmp_path}/shared/step-"
    assert first.startswith(f"rank 1: rank-00001.safetensors could not be written to {where}")
    assert first.endswith("No space left on device; make room there, or save elsewhere")
    assert second.startswith(f"rank 0: manifest.json could not be written to {where}")
    assert third == ""
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
    shapes, optimiser, kind, missing = found["misfits"]
    assert "is of another training: its tensors are not those of this one" in shapes
    assert "model.embedding.weight is [11, 6] in the checkpoint, [11, 7] here" in shapes
    assert shapes.splitlines()[-2].startswith("and ")
    assert optimiser.splitlines()[1] == (
        "the optimiser was one that keeps exp_avg, exp_avg_sq, step (as Adam and AdamW do), "
        "this one is one that keeps momentum_buffer (as SGD with momentum does)"
    )
    assert "model.layers.0.bias is float32 in the checkpoint, float16 here" in kind
    assert "model.another is not in the checkpoint" in missing
    assert found["unkeepable"] == [
        "model.it cannot be kept in a checkpoint: it is a set",
        "model.it cannot be kept in a checkpoint: it is torch.complex128, torch.strided",
    ]


def test_damage_to_any_file_is_noticed_and_the_checkpoint_before_is_used(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    for wrong in run_ranks(saving.damage_each, 2, tmp_path, canary):
        assert wrong == []
    assert not canary.exists()


def test_room_is_looked_for_and_decides_how_to_save(run_ranks: RunRanks, tmp_path: Path) -> None:
    found, other = run_ranks(saving.room_and_mode, 2, tmp_path)
    assert other == found
    mode, said = found["much auto"]
    assert (mode.value, said) == ("async", [])
    assert mode.reason.startswith("saving goes on beside it: copies of what its 2 ranks write take")
    mode, said = found["little auto"]
    assert (mode.value, said) == ("sync", [])
    assert mode.reason.startswith("the training waits for each save: copies of what its 2 ranks")
    assert mode.reason.endswith("of which 2.0 KiB of 3.9 KiB are free")
    assert found["sync stalls"]
    mode, said = found["little async"]
    assert mode.value == "async"
    assert said == ["saving beside the training may take more memory than there is"]
    (apart,), problem, left = found["not shared"]
    assert apart.status.value == "failure"
    assert apart.what == "the ranks do not save to the same place: what rank 1 writes is not there"
    assert apart.why == f"1 of 2 ranks' files are not in {tmp_path}/of-0/saves as seen from rank 0"
    assert apart.fix == "save to a folder that all machines share, or to object storage"
    assert problem[-1] == apart.fix
    assert left == [[], []]  # neither machine keeps what can never be a checkpoint
    assert found["left"] == []  # nor what a killed save left
    (warning,) = found["one fits"]
    assert warning.status.value == "warning"
    assert warning.what == f"there is not enough room for 4 checkpoints in {tmp_path}/empty"
    assert "and while one is saved there are 5: " in warning.why
    assert "9.8 KiB are free" in warning.why
    (failure,) = found["none fits"]
    assert failure.status.value == "failure"
    assert failure.what == f"there is no room for a checkpoint in {tmp_path}/empty"


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
    assert (good, good_again) == ("", "")
    assert "No space left on device; make room there, or save elsewhere" in bad
    assert (one, still_one, two) == (1, 1, 2)


def test_a_service_that_is_lost_fails_a_save_and_nothing_else(run_ranks: RunRanks) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    answers = run_ranks(saving.lose_service, 2)
    assert answers[0] == answers[1]
    good, (bad, kept), good_again = answers[0]
    assert good == ("", [1])
    assert bad.startswith("rank 0: s3://bucket/run cannot be used; ")
    assert "check " in bad
    assert "made-up-secret" not in bad
    assert kept == []  # it kept everything in its memory
    assert good_again == ("", [5])
