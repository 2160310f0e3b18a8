"""A change is told if it is certain and large enough; nothing is told where nothing changed."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from made_up_records import made_up
from torchmuster.bench.comparison import FLOOR, compare_records
from torchmuster.bench.record import BenchRecord, Series
from torchmuster.errors import Impossible

NAMES = tuple(f"series {number}" for number in range(10))


def side(
    drawn: random.Random, *, records: int, spread: float = 0.005, slower: float = 0.0
) -> list[BenchRecord]:
    """Records whose processes differ by ``spread``; the first series is ``slower``."""
    return [
        made_up(
            {
                name: [
                    (1 + slower * (name == NAMES[0])) * process * drawn.lognormvariate(0, 0.005)
                    for _ in range(15)
                ]
                for name in NAMES
                for process in [drawn.lognormvariate(0, spread)]
            },
            minute=number,
        )
        for number in range(records)
    ]


def verdicts(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> dict[str, str]:
    return {one.series.name: one.verdict for one in compare_records(a, b).changes}


def test_a_slow_down_of_3_percent_is_found_among_ten_series() -> None:
    drawn = random.Random(1)
    for _ in range(20):
        found = verdicts(side(drawn, records=8), side(drawn, records=8, slower=0.03))
        assert found == {name: "worse" if name == NAMES[0] else "within noise" for name in NAMES}


def test_a_speed_up_is_better_and_the_direction_is_the_series_own() -> None:
    drawn = random.Random(2)
    a, b = side(drawn, records=8), side(drawn, records=8, slower=-0.05)
    assert verdicts(a, b)[NAMES[0]] == "better"

    def as_speed(some: list[BenchRecord]) -> list[BenchRecord]:
        return [
            replace(one, series=tuple(replace(s, better="higher") for s in one.series))
            for one in some
        ]

    assert verdicts(as_speed(a), as_speed(b))[NAMES[0]] == "worse"


@pytest.mark.slow
def test_nobody_cries_wolf() -> None:
    # Processes that differ by 3 %, samples that hardly do: what one process says is not what the next would say.
    drawn = random.Random(3)
    alarms = sum(
        set(
            verdicts(
                side(drawn, records=8, spread=0.03), side(drawn, records=8, spread=0.03)
            ).values()
        )
        != {"within noise"}
        for _ in range(200)
    )
    assert alarms <= 5  # 1 % of 200 is 2


def test_one_record_on_each_side_tells_only_what_is_beyond_the_floor() -> None:
    drawn = random.Random(4)
    for slower, verdict in ((0.03, "within noise"), (0.25, "worse"), (-0.25, "better")):
        found = compare_records(
            side(drawn, records=1, spread=0.0), side(drawn, records=1, spread=0.0, slower=slower)
        )
        assert not found.by_records
        assert found.records_needed == 7
        assert found.changes[0].verdict == verdict
        assert found.would_be_seen(found.changes[0]) >= FLOOR


def test_a_certain_change_of_less_than_1_percent_is_no_news() -> None:
    a = [made_up({"a": [1.0 + number / 1e6]}) for number in range(8)]
    b = [made_up({"a": [1.008 + number / 1e6]}) for number in range(8)]
    (change,) = compare_records(a, b).changes
    assert 0 < change.low < change.high < 0.01
    assert change.verdict == "within noise"


def exactly(value: float, unit: str = "B") -> BenchRecord:
    series = Series(name="peak", unit=unit, better="lower", samples=(value,))  # type: ignore[arg-type]
    return replace(made_up({}), series=(series,))


def test_what_is_counted_exactly_needs_no_repeats() -> None:
    (change,) = compare_records([exactly(1000)], [exactly(1200)]).changes
    assert change.verdict == "worse"
    assert (change.low, change.high) == pytest.approx((0.2, 0.2))
    assert compare_records([exactly(1000)], [exactly(1000)]).changes[0].verdict == "within noise"
    assert compare_records([exactly(1000)] * 8, [exactly(1020)] * 8).changes[0].verdict == "worse"


def test_of_one_time_on_each_side_nothing_is_known() -> None:
    assert compare_records([exactly(1.0, "s")], [exactly(2.0, "s")]).changes[0].verdict == "unknown"


def test_of_what_can_be_nothing_no_share_is_told() -> None:
    zeros = [made_up({"a": [0.0]})] * 8
    (change,) = compare_records(zeros, [made_up({"a": [1.0]})] * 8).changes
    assert change.verdict == "unknown"


def test_what_not_every_record_has_is_left_out() -> None:
    found = compare_records(
        [made_up({"a": [1.0], "old": [1.0]})], [made_up({"a": [1.0], "new": [1.0]})]
    )
    assert [one.series.name for one in found.changes] == ["a"]
    assert sorted(found.left_out) == ["new", "old"]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (made_up({"a": [1.0]}, bench="data"), "they come from different benches: data, matmul"),
        (made_up({"b": [1.0]}), "no series is in all records: names or labels differ"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: BenchRecord, why: str) -> None:
    with pytest.raises(Impossible) as refusal:
        compare_records([made_up({"a": [1.0]})], [other])
    assert refusal.value.why == why
