"""Records of trials, made from a simple model of a training."""

from collections.abc import Callable

from torchmuster.prove.records import (
    EventRecord,
    MicroBatch,
    ParametersRecord,
    RankRecord,
    StepRecord,
    TrialRecord,
)

PER_EPOCH = 4  # steps
BATCH = 2  # samples of a rank


def step_record(number: int, rank: int = 0, ranks: int = 2, first: bool = False) -> StepRecord:
    """Return step ``number`` (from 1) of a healthy run."""
    epoch, position = divmod(number - 1, PER_EPOCH)
    samples = [f"e{epoch}-{(position * BATCH + one) * ranks + rank}" for one in range(BATCH)]
    return StepRecord(
        step=number,
        micro_batches=[
            MicroBatch(
                inputs=" ".join(samples),
                samples=samples,
                loss=1.0 / number,
                place=(0, epoch, position),
            )
        ],
        rng={"torch": f"torch-{rank}-{number}", "python": "always"},
        buffers=f"buffers-{number}",
        learning_rates=[0.1 / number],
        settings="{}",
        gradients=f"gradients-{number}",
        replicated_square=4.0 / number,
        scale=1024.0,
        state={"exp_avg": f"avg-{number}", "step": str(number)},
        weights=[f"w0-{number}", f"w1-{number}"],
        weights_norm=10.0 + number,
        copies=[f"ema-{number}"],
        weights_before=[f"w0-{number - 1}", f"w1-{number - 1}"] if first else None,
        state_before=_state(number - 1) if first else None,
    )


def _state(number: int) -> dict[str, str]:
    return {"exp_avg": f"avg-{number}", "step": str(number)} if number else {}


def trial(
    steps: range,
    *,
    ranks: int = 2,
    saves: tuple[int, ...] = (),
    change: Callable[[StepRecord, int], None] = lambda step, rank: None,
    trouble: str = "",
) -> TrialRecord:
    """Return a run that makes these steps; ``change`` alters each record, given the rank."""
    records = []
    for rank in range(ranks):
        made = [step_record(n, rank, ranks, first=n == steps.start) for n in steps]
        for one in made:
            change(one, rank)
        records.append(
            RankRecord(
                rank=rank,
                parameters=ParametersRecord(
                    names=["a.weight", "b.weight"],
                    sharded=[False, False],
                    dtype="float32",
                    layers=[],
                ),
                steps=made,
                events=[
                    EventRecord(
                        kind="loader",
                        step=0,
                        line="train.py:7",
                        shuffles=True,
                    )
                ],
            )
        )
    kept = [
        EventRecord(kind="save", step=n, path=f"out/{n}.pt", line="train.py:9", keys=["model"])
        for n in saves
    ]
    return TrialRecord(ranks=records, trouble=trouble, saves=kept)
