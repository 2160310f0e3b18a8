"""What the ranks of a run are doing, as the machines that they run on wrote it down."""

from collections.abc import Iterator, Sequence

from torchmuster.launch.history.node_ranks import NodeRanks
from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Sample

_OF_A_PULSE = {
    "step": catalogue.RANK_STEP,
    "silent_s": catalogue.RANK_SILENT,
    "busy": catalogue.RANK_CPUS,
    "memory_bytes": catalogue.RANK_MEMORY,
    "data_share": catalogue.RANK_DATA,
    "communication_share": catalogue.RANK_WAITING,
}


def number(nodes: Sequence[NodeRanks], labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield how many ranks of a run there are on all its machines; nothing while none was seen."""
    if nodes:
        yield Sample(catalogue.RUN_RANKS, labels, float(sum(len(node.ranks) for node in nodes)))


def samples(nodes: Sequence[NodeRanks], labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield what is known of each rank; ``labels`` are those of its run."""
    for node in nodes:
        for pulse in node.ranks:
            own = (*labels, node.host, str(pulse.rank))
            for field, metric in _OF_A_PULSE.items():
                if (value := getattr(pulse, field)) is not None:
                    yield Sample(metric, own, float(value))
