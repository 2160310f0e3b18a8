"""The line a run prints, and its verdict."""

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.train.step_line import StepRecord, dominant_cost, render_step_line

pytestmark = pytest.mark.engine

RECORD = StepRecord(
    step=150,
    epoch=2,
    loss=0.43214,
    learning_rate=1e-4,
    gradient_norm=None,
    samples=400,
    samples_per_s=5120.4,
    tokens_per_s=None,
    step_s=0.0125,
    data_share=0.031,
    compute_share=0.859,
    communication_share=0.11,
    checkpoint_share=0.0,
    evaluation_share=0.0,
    skipped_steps=0,
    memory_peak_bytes=3 * 1024**3,
)


def test_a_line_says_where_the_run_is_and_what_its_time_goes_into(
    snapshot: SnapshotAssertion,
) -> None:
    assert render_step_line(RECORD) == snapshot


def test_a_line_has_at_most_100_characters() -> None:
    record = replace(
        RECORD,
        step=1_234_567,
        epoch=1234,
        gradient_norm=1.23e-10,
        tokens_per_s=1e9,
        mfu=0.4,
        skipped_steps=123,
        data_share=0.2,
        checkpoint_share=0.2,
        evaluation_share=0.2,
    )
    line = render_step_line(record, last_step=9_999_999)
    assert 80 < len(line) <= 100


@pytest.mark.parametrize(
    ("data", "communication", "checkpoint", "said"),
    [
        ([0.05, 0.06], [0.1, 0.1], 0.0, ""),
        ([0.52, 0.5], [0.1, 0.1], 0.0, "waits for data 52 % of the time: more loader workers"),
        (
            [0.01, 0.4],
            [0.4, 0.0],
            0.0,
            "rank 1 waits for data 40 % of the time: more loader workers",
        ),
        ([0.0, 0.0, 0.0], [0.4, 0.05, 0.4], 0.0, "the others wait for rank 1"),
        ([0.25, 0.22], [0.6, 0.0], 0.0, "the others wait for rank 1"),
        ([0.6, 0.62], [0.3, 0.0], 0.0, "waits for data 62 % of the time: more loader workers"),
        (
            [0.0, 0.0],
            [0.35, 0.41],
            0.0,
            "waits for communication 38 % of the time: larger micro-batches or more accumulation",
        ),
        ([0.0, 0.0], None, 0.15, "saves checkpoints 15 % of the time: save less often"),
        ([0.0, 0.0], None, 0.0, ""),
    ],
)
def test_one_verdict_names_what_dominates(
    data: list[float], communication: list[float] | None, checkpoint: float, said: str
) -> None:
    assert said == dominant_cost(
        data_shares=data,
        communication_shares=communication,
        checkpoint_share=checkpoint,
        data_fix="more loader workers",
    )
