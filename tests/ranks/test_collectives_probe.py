"""The collectives probe as real ranks: good ones are left alone, and each fault is found in its rank.

The faults are those of ``faulty/sitecustomize.py``: the probe knows nothing of them.
"""

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from ranks.conftest import Ran, Torchrun
from torchmuster.diagnose import collectives, wrong_values
from torchmuster.diagnose.rank_record import RankRecord, records_from
from torchmuster.finding import Finding, Status

pytestmark = pytest.mark.ranks

MODULE = "torchmuster.diagnose.probes.collectives"
FAULTY = Path(__file__).parent / "faulty"


def probe(torchrun: Torchrun, fault: str | None = None, *, ranks: int = 2) -> list[RankRecord]:
    """Run the probe, with a fault in rank 1; return the records."""
    env = {"PYTHONPATH": str(FAULTY), "FAULT": fault, "FAULT_RANK": "1"} if fault else {}
    ran: Ran = torchrun("-m", MODULE, ranks=ranks, env=env)
    assert ran.code == 0, ran.err
    records = records_from(ran.out.splitlines())
    assert [record.rank for record in records] == list(range(ranks)), ran.err
    return records


def only(findings: list[Finding]) -> Finding:
    """Return the one failure; that a rank is slow beside the others may be told too, on a busy machine."""
    (finding,) = [one for one in findings if one.status is Status.FAILURE]
    return finding


@pytest.mark.nightly
@pytest.mark.alone  # beside others, a good rank may be slow enough to be named
@pytest.mark.parametrize("ranks", [1, 3])
def test_good_ranks_compare_every_value_and_nothing_is_found(
    torchrun: Torchrun, ranks: int
) -> None:
    records = probe(torchrun, ranks=ranks)
    assert collectives.judge_collectives(records) == []
    for record in records:
        assert record.ended
        assert record.trouble is None
        names = [one.name for one in record.operations]
        assert names == ["all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all"]
        assert all(one.values.compared > 4096 for one in record.operations)
        assert [one.peer for one in record.pairs] == [r for r in range(ranks) if r != record.rank]
        assert all(one.bytes_per_s for one in record.pairs)
        (product,) = record.matmuls
        assert product.flops_per_s > 1e8
        assert product.values.compared >= 65536


@pytest.mark.parametrize(
    "fault", ["corrupt-sum", pytest.param("corrupt-result", marks=pytest.mark.nightly)]
)
def test_one_wrong_value_in_a_million_is_found_with_its_rank(
    torchrun: Torchrun, fault: str, snapshot: SnapshotAssertion
) -> None:
    records = probe(torchrun, fault, ranks=3)
    finding = only(collectives.judge_collectives(records))
    assert finding.name == "wrong-values"
    _device, rank, does = finding.what.partition("(rank 1): ")
    assert rank
    assert "all-reduce" in does
    assert does == snapshot
    wrong = {one.rank: one.operations[0].values.wrong for one in records}
    # What a rank adds wrongly all get; what it spoils afterwards only it has.
    assert all(wrong.values()) if fault == "corrupt-sum" else (not wrong[0] and wrong[1])
    assert records[0].suspects == ((1,),)


@pytest.mark.nightly
def test_zeros_from_others_are_found_and_a_second_try_is_asked_for(torchrun: Torchrun) -> None:
    records = probe(torchrun, "p2p-zeros", ranks=3)
    finding = only(collectives.judge_collectives(records))
    assert finding.name == "p2p-wrong"
    assert "(rank 1): corrupted values in transfers" in finding.what
    assert wrong_values.second_try(records) == wrong_values.SECOND_TRY


@pytest.mark.nightly
def test_a_hang_ends_in_time_and_names_the_rank(
    torchrun: Torchrun, snapshot: SnapshotAssertion
) -> None:
    finding = only(collectives.judge_collectives(probe(torchrun, "hang", ranks=3)))
    assert finding.name == "collective-hangs"
    _device, rank, does = finding.what.partition("(rank 1) ")
    assert rank
    assert does == snapshot


@pytest.mark.nightly
def test_a_device_that_computes_wrongly_is_found(torchrun: Torchrun) -> None:
    finding = only(collectives.judge_collectives(probe(torchrun, "wrong-matmul")))
    assert finding.name == "wrong-device"
    assert "(rank 1) computes wrong results: " in finding.what
    # The third row of 256 columns, and five more.
    assert "the first at index 773: " in finding.evidence


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize("fault", ["slow", "slow-matmul"])
def test_a_slow_device_is_found(torchrun: Torchrun, fault: str) -> None:
    (finding,) = collectives.judge_collectives(probe(torchrun, fault))
    assert finding.name == "slow-device"
    assert "(rank 1) computes at " in finding.what
