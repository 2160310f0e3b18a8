"""What Slurm really writes down of an allocation is understood."""

import pytest

from slurm.slurm_lab import SlurmLab
from slurm.test_srun import allocate
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.launch.schedulers.slurm.allocation import check_counts, expand_hostlist


@pytest.mark.parametrize(
    "node_list",
    [
        "node[1-3]",
        "a",
        "a,b",
        "gpu-a[008-011,13]",
        "r[1-2]n[1-2]",
        "x[1,3-4],login,y[09-10]",
        "b2,b1,a[2,1]",
    ],
)
def test_node_lists_are_written_out_as_slurm_does(cluster: SlurmLab, node_list: str) -> None:
    assert (
        list(expand_hostlist(node_list))
        == cluster.run("scontrol", "show", "hostnames", node_list).split()
    )


def test_nodes_with_different_numbers_of_gpus_are_refused(cluster: SlurmLab) -> None:
    allocation = allocate(cluster, "-N2", "--gpus=5")
    assert allocation.gpus == (4, 1)
    with pytest.raises(Impossible) as caught:
        check_counts(allocation, JobSpec(name="j", command=("t.py",), folder="/"))
    assert allocation.job in caught.value.what
    assert "node1 4, node2 1" in caught.value.why
    assert caught.value.fix == "sbatch --nodes=2 --gpus-per-node=4"


def test_a_job_without_gpus_has_none(cluster: SlurmLab) -> None:
    assert allocate(cluster, "-N2").gpus is None
