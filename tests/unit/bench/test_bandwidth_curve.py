"""What a curve of bandwidth says: peak, half of it, dips that are sure, falls at the end."""

from torchmuster.bench.bandwidth import points_of, shape_of


def curve(*bandwidths: float, spread: float = 0.01) -> dict[int, list[float]]:
    """Return times by size (1 KiB, 4 KiB, …) that have these bandwidths."""
    sizes = [1024 * 4**place for place in range(len(bandwidths))]
    return {
        size: [size / bandwidth * (1 + spread * step) for step in range(-5, 6)]
        for size, bandwidth in zip(sizes, bandwidths, strict=True)
    }


def test_a_healthy_curve_has_a_peak_and_nothing_odd() -> None:
    shape = shape_of(points_of(curve(1e7, 4e7, 15e7, 5e8, 9e8, 1e9), 1.0))
    assert shape.peak.size_bytes == 1024 * 4**5
    assert shape.half_at_bytes == 1024 * 4**3
    assert shape.dips == ()
    assert shape.falls_to is None


def test_half_of_the_peak_lies_between_two_sizes() -> None:
    shape = shape_of(points_of(curve(1e8, 1e9), 1.0))
    assert shape.half_at_bytes is not None
    assert 1024 < shape.half_at_bytes < 4096


def test_a_curve_that_begins_above_half_has_no_such_size() -> None:
    assert shape_of(points_of(curve(8e8, 9e8, 1e9), 1.0)).half_at_bytes is None


def test_a_dip_is_named_with_its_size_and_depth() -> None:
    shape = shape_of(points_of(curve(1e8, 5e8, 2e8, 8e8, 9e8), 1.0))
    (dip,) = shape.dips
    assert dip.size_bytes == 1024 * 4**2
    assert round(dip.share, 2) == 0.4


def test_a_dip_within_the_noise_is_none() -> None:
    shape = shape_of(points_of(curve(1e8, 5e8, 3e8, 8e8, 9e8, spread=0.15), 1.0))
    assert shape.dips == ()


def test_what_stays_low_at_the_end_has_fallen_and_is_no_dip() -> None:
    shape = shape_of(points_of(curve(1e8, 1e9, 5e8, 4e8), 1.0))
    assert shape.dips == ()
    assert shape.falls_to is not None
    assert shape.falls_to.size_bytes == 1024 * 4**3


def test_the_factor_makes_bus_bandwidths() -> None:
    (point,) = points_of({1000: [1e-6] * 9}, 1.5)
    assert round(point.bytes_s.median) == 1_500_000_000
