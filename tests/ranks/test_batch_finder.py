"""The largest micro-batch on real ranks with unequal limits: the weakest decides, as trying every size shows."""

import random
from pathlib import Path

import pytest

from batch_size_cases import cases, write_model
from rank_group import RunRanks
from rank_programs.batch_sizes import candidate_for
from torchmuster.errors import MusterError
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.proof.real_ranks import run_real_steps
from torchmuster.plan.proof.trials import find_batch_size, with_size
from torchmuster.units import GiB

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]
LINK = 1e9
HERE = Hardware(
    card=Gpu(name="CPU", memory_bytes=4 * GiB, flops={}, bandwidth_bytes_s=1e10, kind="cpu"),
    machines=1,
    cards_per_machine=2,
    within_bytes_s=LINK,
    between_bytes_s=LINK,
)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_weakest_rank_decides(strategy: str, own_machine: Path, run_ranks: RunRanks) -> None:
    ranks = 2
    work = write_model(own_machine)
    case = cases(work, run_ranks)(strategy, ranks, random.Random(ranks))
    said: list[str] = []
    size, trials = find_batch_size(
        work,
        with_size(candidate_for(strategy, ranks), case.right, samples=None),  # the plan's size
        hardware=HERE,
        limits_bytes=case.limits_bytes,
        say=said.append,
    )
    assert size == case.right, str(case)
    fits, fails = trials
    assert [one.rank for one in fits.ranks] == list(range(ranks))
    assert f"; rank {case.weakest} uses " in str(fits)
    assert not fails.fits
    assert case.weakest in [one.rank for one in fails.ranks]
    verdicts = [text for text in said if text.startswith("micro-batch ")]
    assert verdicts == [str(fits), str(fails)]


def test_another_failure_is_no_verdict_on_memory(own_machine: Path) -> None:
    work = write_model(own_machine)
    (own_machine / "own.py").write_text("def model():\n    raise ValueError('no such luck')\n")
    with pytest.raises(MusterError) as refused:
        run_real_steps(work, candidate_for("ddp", 1), steps=0)
    assert refused.value.what == "the real steps failed"
    assert "no such luck" in refused.value.why
