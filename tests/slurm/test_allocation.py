"""What Slurm really says of an allocation is understood."""

from slurm.slurm_lab import SlurmLab
from slurm.test_srun import allocate


def test_a_job_without_gpus_has_none(cluster: SlurmLab) -> None:
    assert allocate(cluster, "-N2").gpus_per_node is None
