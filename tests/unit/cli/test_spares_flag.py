"""``--spares``: how it combines with the number of hosts, and what is refused."""

from dataclasses import replace

import pytest

from torchmuster.cli import job_flags
from torchmuster.cli.slurm_run import for_so_many
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec, NodeCounts

SPEC = JobSpec(name="x", command=("x.py",), folder="/x", spares=2)


class Options:
    """Parsed flags."""

    def __init__(self, nodes: NodeCounts | None) -> None:
        self.nodes = nodes


def test_a_run_with_spares_is_restarted_although_its_default_is_not_to_be() -> None:
    assert job_flags.with_spares(SPEC, 3).max_restarts == job_flags.USUAL_RESTARTS
    assert job_flags.with_spares(replace(SPEC, max_restarts=7), 3).max_restarts == 7
    assert job_flags.with_spares(replace(SPEC, spares=0), 1).max_restarts == 0


@pytest.mark.parametrize("machines", [0, 1, 2])
def test_spares_need_a_host_that_is_not_a_spare(machines: int) -> None:
    with pytest.raises(Impossible) as refused:
        job_flags.with_spares(SPEC, machines)
    assert "--spares 2" in refused.value.what
    assert "3 or more hosts" in refused.value.fix


def test_nodes_counts_the_hosts_without_spares() -> None:
    four = NodeCounts(least=2, most=4)
    job = for_so_many(Options(four), SPEC, 6)  # type: ignore[arg-type]
    assert (job.min_nodes, job.spares) == (2, 2)
    with pytest.raises(Impossible) as refused:
        for_so_many(Options(four), SPEC, 4)  # type: ignore[arg-type]
    assert refused.value.fix == "--nodes 2:2"
