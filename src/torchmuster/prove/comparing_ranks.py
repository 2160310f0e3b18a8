"""Compare the ranks of a run. Pure functions of records."""

from torchmuster.prove.comparing import Difference
from torchmuster.prove.records import RankRecord, TrialRecord

_MOST = 0.5  # share of the samples
_FEW_SAMPLES = 4


def compare_ranks(record: TrialRecord) -> list[Difference]:
    """Return what is wrong between the ranks of a run, and between its epochs and workers."""
    checks = (_same_data, uneven_batches, _replicas, _buffers, _epoch_order, _worker_seeds)
    differences = [check(record) for check in checks]
    return [difference for difference in differences if difference is not None]


# ---- the data of ranks, epochs and workers


def _same_data(record: TrialRecord) -> Difference | None:
    first, *more = [_first_samples(rank, record.steps) for rank in record.ranks]
    for rank, samples in enumerate(more, start=1):
        shared = len(samples & first)
        if min(len(samples), len(first)) >= _FEW_SAMPLES and shared / len(samples) > _MOST:
            share = round(100 * shared / len(samples))
            what = f"{share} % of the samples of rank {rank} are also read by rank 0 ({shared} of {len(samples)})"
            line = record.ranks[0].loader_line
            return Difference(kind="same-data", step=1, what=what, rank=rank, line=line)
    return None


def _first_samples(rank: RankRecord, steps: int) -> set[str]:
    """Return the samples up to the first one that comes again: a loader that is not known may repeat epochs."""
    seen: set[str] = set()
    for step in rank.steps[:steps]:
        for batch in step.micro_batches:
            if batch.place is not None and batch.place[1] > 0:
                continue
            for sample in batch.samples:
                if sample in seen:
                    return seen
                seen.add(sample)
    return seen


def uneven_batches(record: TrialRecord) -> Difference | None:
    """Return where ranks do not have the same amount of data; they then wait for each other in vain."""
    kind = "uneven-batches"
    for step in range(record.steps):
        counts = [len(rank.steps[step].micro_batches) for rank in record.ranks]
        if len(set(counts)) > 1:
            what = f"ranks have {counts} micro-batches in the same step"
            return Difference(kind=kind, step=step + 1, what=what)
    samples = [_samples_of_first_epoch(rank) for rank in record.ranks]
    if all(samples) and len(set(samples)) > 1:
        what = f"ranks read different numbers of samples in one epoch: {samples}"
        line = record.ranks[0].loader_line
        return Difference(kind=kind, step=record.steps, what=what, line=line)
    made = [len(rank.steps) for rank in record.ranks]
    if max(made) - record.steps > 1:
        return Difference(kind=kind, step=record.steps, what=f"ranks made {made} steps")
    return None


Epoch = tuple[int, int]  # a loader, and its iteration


def _epochs(rank: RankRecord) -> dict[Epoch, list[tuple[int, str]]]:
    """Return the samples of each iteration of each loader in order, each with its step."""
    epochs: dict[Epoch, list[tuple[int, str]]] = {}
    for step in rank.steps:
        for batch in step.micro_batches:
            if batch.place is not None:
                samples = [(step.step, sample) for sample in batch.samples]
                epochs.setdefault(batch.place[:2], []).extend(samples)
    return epochs


def _samples_of_first_epoch(rank: RankRecord) -> int:
    """Return the samples of the first iteration of the training loader; 0 if it did not end."""
    epochs = _epochs(rank)
    loader, iteration = next(iter(epochs), (0, 1))
    if iteration > 0 or (loader, 1) not in epochs:
        return 0
    return len(epochs[loader, 0])


def _epoch_order(record: TrialRecord) -> Difference | None:
    rank = record.ranks[0]
    shuffling = {event.loader for event in rank.of_kind("loader") if event.shuffles}
    epochs = _epochs(rank)
    for (loader, iteration), epoch in epochs.items():
        following = epochs.get((loader, iteration + 1), [])
        if loader not in shuffling or min(len(epoch), len(following)) < 2 * _FEW_SAMPLES:
            continue
        samples = [sample for _, sample in epoch]
        pairs = zip(samples, following, strict=False)
        if len(set(samples)) >= _FEW_SAMPLES and all(old == new for old, (_, new) in pairs):
            what = f"the loader shuffles, but epochs {iteration + 1} and {iteration + 2} have the same order"
            step, line = following[0][0], rank.loader_line
            return Difference(kind="epoch-order", step=step, what=what, line=line)
    return None


def _worker_seeds(record: TrialRecord) -> Difference | None:
    for rank in record.ranks:
        # By loader, its iteration, and the generator.
        states: dict[tuple[int, int, str], list[str]] = {}
        for event in rank.of_kind("worker"):
            for generator, state in event.random.items():
                states.setdefault((event.loader, event.step, generator), []).append(state)
        for (_, _, generator), workers in states.items():
            if len(workers) > 1 and len(set(workers)) == 1:
                what = f"all {len(workers)} loader workers begin with the same random state of {generator}"
                line = rank.loader_line
                return Difference(kind="worker-seeds", step=1, what=what, rank=rank.rank, line=line)
    return None


# ---- the model of ranks


def _replicas(record: TrialRecord) -> Difference | None:
    first = record.ranks[0]
    if first.parameters is None:
        return None
    whole = [index for index, is_part in enumerate(first.parameters.sharded) if not is_part]
    for step in range(record.steps):
        expected = first.steps[step].weights
        for rank in record.ranks[1:]:
            weights = rank.steps[step].weights
            what = "ranks train different parameters"
            wrong = whole
            if len(weights) == len(expected):
                wrong = [index for index in whole if weights[index] != expected[index]]
                what = f"after step {step + 1}, {len(wrong)} of {len(whole)} parameters of rank {rank.rank} differ from those of rank 0"
            if wrong:
                what += f", the first is {first.parameters.names[wrong[0]]}"
                return Difference(kind="replicas-differ", step=step + 1, what=what, rank=rank.rank)
    return None


def _buffers(record: TrialRecord) -> Difference | None:
    for step in range(1, record.steps):
        expected = record.ranks[0].steps[step].buffers
        for rank in record.ranks[1:]:
            if rank.steps[step].buffers != expected:
                what = f"the buffers of the model (BatchNorm) differ between rank 0 and rank {rank.rank}"
                return Difference(kind="buffers-differ", step=step + 1, what=what, rank=rank.rank)
    return None
