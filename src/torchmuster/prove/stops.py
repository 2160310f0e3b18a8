"""Where the runs of a proof are stopped. Pure."""

from torchmuster.prove.records import PlannedStop, StepRecord, TrialRecord

HOW = {
    "killed": "SIGKILL of all ranks",
    "rank-killed": "SIGKILL of one rank",
    "terminated": "SIGTERM",
    "save-killed": "SIGKILL during torch.save",
}


def stops_for(baseline: TrialRecord) -> list[PlannedStop]:
    """Choose where to stop: in an epoch, at its end, by SIGTERM, and in a save.

    Each stop follows a checkpoint by one step, so that a script that ignores its newest checkpoint is noticed.
    """
    steps = baseline.ranks[0].steps
    last = baseline.steps - 1
    saves = sorted({save.step for save in baseline.saves if 0 < save.step <= last})
    if not saves:
        return []
    at_end = [save for save in saves if _ends_epoch(steps[save - 1], steps[save])]
    inside = [save for save in saves if save not in at_end] or saves
    middle = inside[-2] if len(inside) > 2 else inside[-1]
    end = (at_end or saves)[-1]

    def after(save: int) -> int:
        return save if save + 1 in saves else min(save + 1, last)

    term = min(inside[0] + 1, last)
    between = int(len(steps[term].micro_batches) > 1)  # two micro-batches, if there are some
    stops = [
        PlannedStop(name="killed", after_step=after(middle)),
        PlannedStop(name="rank-killed", after_step=after(end)),
        PlannedStop(name="terminated", after_step=term, in_micro_batch=between),
    ]
    if len(saves) > 1:
        stops.append(PlannedStop(name="save-killed", after_step=saves[1]))
    return stops


def _ends_epoch(step: StepRecord, following: StepRecord) -> bool:
    """Return whether the second of two steps begins another iteration of its loader."""
    before, after = step.micro_batches[0].place, following.micro_batches[0].place
    return before is not None and after is not None and before[:2] != after[:2]
