"""A training that follows a plan: ``strategy: auto`` traces where sizes do not decide, and ``--plan`` is kept to."""

import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from batch_size_cases import write_model
from muster_command import Muster
from rank_group import RunRanks
from rank_programs import planned
from torchmuster.plan.proof import comparison
from torchmuster.runfolder import list_runs
from torchmuster.units import GiB, MiB

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]


def test_where_sizes_do_not_decide_the_first_rank_traces_for_all(
    own_machine: Path, run_ranks: RunRanks
) -> None:
    write_model(own_machine)
    # States are a small part; they are not, and a copy fits; it does not, beside what a process takes.
    memories = [4 * GiB, GiB, 320 * MiB]
    told = run_ranks(planned.spread, 2, str(own_machine), 280 * MiB, memories)
    assert told[0] == told[1]
    (clear, roomy, tight) = told[0]
    assert clear == ["ddp", "ddp: by its states"]
    assert roomy[0] == "ddp"
    assert re.fullmatch(
        r"ddp: according to a trace, a full copy takes 3\d\d MiB of 1\.0 GiB per rank with micro-batches of 4 "
        r"\(280 MiB of it states\)",
        roomy[1],
    )
    assert tight[0] == "fsdp"
    promise = comparison.read_promise(own_machine / "run-1")
    assert promise is not None
    assert promise.candidate.layout.copies == 2
    assert MiB < promise.tensor_bytes < 3 * MiB
    assert comparison.read_promise(own_machine / "run-2") is None


def test_a_training_follows_its_plan_and_is_held_against_it(
    muster: Muster, own_machine: Path
) -> None:
    write_model(own_machine)
    (own_machine / "config.yaml").write_text(
        "model: {build: 'own:model'}\ndata: {dataset: 'own:data'}\n"
        "train: {steps: 4, global_batch_size: 8}\ncheckpoint: {enabled: false}\n"
    )
    flags = ("--config", "config.yaml", "--plan", "--device", "cpu", "--ranks", "2")
    environment = {"XDG_CACHE_HOME": str(own_machine / "cache"), "COLUMNS": "300"}
    done = muster("train", *flags, env=environment)
    assert done.code == 0, done
    assert "plan: ddp over 2 " in done.err
    (run,) = list_runs(own_machine / "runs")
    promise = comparison.read_promise(run.path)
    assert promise is not None
    size = promise.candidate.micro_batch_size
    assert f"  micro_batch_size: {size}  # --plan\n" in run.config.read_text()
    assert f"batch     {size} per rank x 2 ranks" in done.out
    (line,) = [one for one in done.out.splitlines() if "plan after step 3: " in one]
    assert (
        "memory is not measured on the CPU; muster plan --verify measures it; a step takes " in line
    )
    assert "step 3/4" in done.out


def test_a_plan_is_for_this_machine_and_for_a_new_run(
    muster: Muster, own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    write_model(own_machine)
    (own_machine / "config.yaml").write_text(
        "model: {build: 'own:model'}\ndata: {dataset: 'own:data'}\n"
    )
    done = muster("train", "--config", "config.yaml", "--plan", "--hosts", "a,b")
    assert done.code == 2
    assert "--plan " in done.err
    assert done.err == snapshot
    assert "muster plan --hardware … --write plan.yaml" in done.err
