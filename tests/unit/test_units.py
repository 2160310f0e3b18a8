"""Sizes and durations, as people write them and as people read them."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.units import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1073741824", GiB),
        ("0", 0),
        ("17 B", 17),
        ("30GiB", 30 * GiB),
        ("30 gib", 30 * GiB),
        (" 30GiB ", 30 * GiB),
        ("24GB", 24 * 10**9),
        ("24 Gb", 24 * 10**9),
        ("512M", 512 * MiB),
        ("512MiB", 512 * MiB),
        ("512MB", 512 * 10**6),
        ("4K", 4 * KiB),
        ("4kB", 4000),
        ("1.5TiB", 3 * TiB // 2),
        ("2TB", 2 * 10**12),
        ("2t", 2 * TiB),
        (".5g", GiB // 2),
        ("0.3B", 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("letter", "KMGT")
def test_a_bare_letter_is_binary_and_only_the_b_makes_it_decimal(letter: str) -> None:
    assert parse_bytes(f"1{letter}") == parse_bytes(f"1{letter}iB") > parse_bytes(f"1{letter}B")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 10),
        ("1.5", 1.5),
        ("10s", 10),
        ("5m", 300),
        ("5 min", 300),
        ("2h", 7200),
        ("1d", 86400),
        ("0.5H", 1800),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


def refusal(parse: Callable[[str], float], text: str) -> str:
    with pytest.raises(ValueError, match="is not a") as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "1e9", "1.GiB", "1 2", "9" * 400])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    told = refusal(parse_bytes, text)
    assert told.startswith(f"{text!r} is not a size; ")
    assert "30GiB" in told


def test_an_absurd_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than"):
        parse_seconds("99999999999d")


@pytest.mark.parametrize("text", ["", "s", "-1s", "1:30", "1h30m", "9" * 400])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    told = refusal(parse_seconds, text)
    assert told.startswith(f"{text!r} is not a duration; ")
    assert "30s" in told


def test_an_unknown_unit_is_named(snapshot: SnapshotAssertion) -> None:
    assert refusal(parse_bytes, "30 GiBs") == snapshot
    assert refusal(parse_seconds, "500ms") == snapshot


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.0 KiB"),
        (512 * MiB, "512 MiB"),
        (round(79.15 * GiB), "79.2 GiB"),
        (round(99.9 * GiB), "99.9 GiB"),
        (round(99.96 * GiB), "100 GiB"),
        (1000 * MiB, "1000 MiB"),
        (GiB - 1, "1.0 GiB"),
        (80 * GiB, "80.0 GiB"),
        (2000 * TiB, "2000 TiB"),
    ],
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (119, "1 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (86400, "24 h"),
        (2 * 86400, "2 d"),
        (90 * 86400, "90 d"),
    ],
)
def test_durations_are_written_by_their_largest_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=10**15))
def test_a_bare_number_of_bytes_is_exact(count: int) -> None:
    assert parse_bytes(str(count)) == count


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=1000 * TiB))
def test_a_written_size_reads_back_as_nearly_the_same(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.051)


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=1000 * TiB))
def test_a_written_size_never_needs_a_larger_unit(count: int) -> None:
    amount, unit = format_bytes(count).split()
    assert float(amount) < 1024 or unit == "TiB"


@settings(deadline=None)
@given(st.floats(min_value=0, max_value=1e9))
def test_a_written_duration_never_claims_more_than_was(seconds: float) -> None:
    assert seconds / 2 < parse_seconds(format_seconds(seconds)) + 1 <= seconds + 1
