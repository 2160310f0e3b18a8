"""What unstable trainings show: where fp16 overflowed, whether its scale mended it, whether bf16 survived."""

from syrupy.assertion import SnapshotAssertion

from torchmuster.bench.stability import (
    Course,
    stability_findings,
    stability_pictures,
    stability_table,
)
from torchmuster.finding import Status


def mended() -> Course:
    return Course(
        case="large losses",
        precision="fp16",
        losses=(9000.0, 9000.0, 8000.0, 7000.0),
        scales=(32768.0, 16384.0, 16384.0, 16384.0),
        skipped=(0, 1),
        culprit="the output of layers.2",
        kind="Inf",
    )


def beyond_mending() -> Course:
    return Course(
        case="large activations",
        precision="fp16",
        losses=(None, None),
        scales=(32768.0, 16384.0),
        skipped=(0, 1),
        culprit="layers.5",
        kind="Inf",
        in_forward=True,
    )


def survived() -> Course:
    return Course(case="large activations", precision="bf16", losses=(1.5, 1.2))


def test_an_overflow_that_the_scale_mends_is_told_with_where_it_was(
    snapshot: SnapshotAssertion,
) -> None:
    (found,) = stability_findings([mended()])
    assert found.status is Status.NOTE
    assert "layers.2" in found.why
    assert found == snapshot


def test_an_overflow_in_the_forward_is_told_as_beyond_mending_with_its_layer(
    snapshot: SnapshotAssertion,
) -> None:
    (found,) = stability_findings([beyond_mending()])
    assert "layers.5" in found.what
    assert found.fix.startswith("use bf16")
    assert found == snapshot


def test_bf16_that_learns_is_fine_and_one_that_does_not_is_a_warning() -> None:
    (fine,) = stability_findings([survived()])
    assert fine.status is Status.OK
    stuck = Course(case="large activations", precision="bf16", losses=(1.5, 1.6))
    (warning,) = stability_findings([stuck])
    assert warning.status is Status.WARNING
    assert "bf16 failed" in warning.what


def test_the_table_and_the_pictures_show_losses_and_scales() -> None:
    courses = [mended(), beyond_mending(), survived()]
    rows = stability_table(courses).rows
    assert rows[1] == (
        "large activations",
        "fp16",
        "not finite",
        "not finite",
        "2 of 2",
        "layers.5 (Inf)",
    )
    drawn = list(stability_pictures(courses))
    assert [one.title for one in drawn] == [
        "losses of large losses",
        "losses of large activations",
        "loss scale of fp16",
    ]
