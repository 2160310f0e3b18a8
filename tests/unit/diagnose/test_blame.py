"""The fewest causes of bad directions: an end, else a link."""

from itertools import permutations

import pytest

from torchmuster.diagnose.blame import Blamed, Direction, blame

ALL = set(permutations(range(4), 2))


def both(*pairs: Direction) -> set[Direction]:
    return {*pairs, *((high, low) for low, high in pairs)}


@pytest.mark.parametrize(
    ("bad", "causes"),
    [
        (set(), []),
        (ALL, [(Blamed.EVERYTHING, None)]),
        (both((0, 2), (1, 2), (2, 3)), [(Blamed.END, 2)]),
        ({(0, 2), (1, 2), (3, 2)}, [(Blamed.INTO, 2)]),
        ({(2, 0), (2, 1), (2, 3)}, [(Blamed.OUT_OF, 2)]),
        (both((1, 3)), [(Blamed.LINK, None)]),
        ({(1, 3)}, [(Blamed.DIRECTION, None)]),
        (both((0, 1), (0, 2)), [(Blamed.LINK, None), (Blamed.LINK, None)]),
        (both((0, 1), (0, 2), (0, 3)) | {(2, 1)}, [(Blamed.END, 0), (Blamed.DIRECTION, None)]),
    ],
)
def test_among_all_directions(bad: set[Direction], causes: list[tuple[Blamed, int | None]]) -> None:
    found = blame(bad, ALL)
    assert [(one.kind, one.end) for one in found] == causes
    explained = [direction for one in found for direction in one.directions]
    assert sorted(explained) == sorted(bad)


def test_where_only_bad_ones_were_seen_an_end_of_several_is_the_cause() -> None:
    assert [one.end for one in blame(both((0, 1), (0, 2)))] == [0]
    assert [one.end for one in blame(both((0, 1)))] == [None]
    assert [one.end for one in blame({(3, 3)})] == [3]
