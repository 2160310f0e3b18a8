"""Whether a run is under way in this environment, so that its variables and ports are as they should be."""

from collections.abc import Mapping

# Where one of these is set, a scheduler or torchrun has set the others for a run that is under way.
_MARKS = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "KUBERNETES_SERVICE_HOST",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
)


def is_under_way(environment: Mapping[str, str]) -> bool:
    """Say whether a scheduler or torchrun has prepared this environment."""
    return any(one in environment for one in _MARKS)
