"""The machine's rates, measured by real ranks at once."""

from pathlib import Path

import pytest

from torchmuster.plan.timing import calibration

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]


def test_two_ranks_measure_products_memory_and_collectives(own_machine: Path) -> None:
    found = calibration.measure_calibration([2])
    rates = found.by_ranks[2]
    assert set(rates.flops) == {"float32", "bfloat16"}
    assert 1e8 < rates.flops["float32"] < 1e13
    assert 1e7 < rates.bandwidth_bytes_s < 1e13
    assert 1e-8 < rates.operation_s < 1e-2
    kinds = {key.split()[0] for key in rates.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter"}
    for link in rates.collectives.values():
        assert link.bytes_s > 1e5
        assert 0 <= link.latency_s < 10
    assert found.source.startswith(f"measured on {found.machine} on 20")
