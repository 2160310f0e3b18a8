"""What the ranks of a run are doing, as the machines that they run on wrote it down."""

from collections.abc import Iterator

from torchmuster.launch import node_ranks
from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Sample
from torchmuster.runfolder import RunFolder

_OF_A_PULSE = {
    "step": catalogue.RANK_STEP,
    "silent_s": catalogue.RANK_SILENT,
    "busy": catalogue.RANK_CPUS,
    "memory_bytes": catalogue.RANK_MEMORY,
    "data_share": catalogue.RANK_DATA,
    "communication_share": catalogue.RANK_WAITING,
}


def samples(run: RunFolder, job: str, now_unix_s: float) -> Iterator[Sample]:
    """Yield what is known of each rank, and how many there are."""
    nodes = node_ranks.read(run, now_unix_s)
    if not nodes:
        return
    yield Sample(catalogue.RUN_RANKS, (job, run.id), sum(len(node.ranks) for node in nodes))
    for node in nodes:
        for pulse in node.ranks:
            labels = (job, run.id, node.host, str(pulse.rank))
            for field, metric in _OF_A_PULSE.items():
                if (value := getattr(pulse, field)) is not None:
                    yield Sample(metric, labels, float(value))
