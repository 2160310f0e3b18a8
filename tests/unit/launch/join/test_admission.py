"""The door: how many are listened to, in which order, and who has to go."""

import collections

from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launch.transports.join.connection_handler import ConnectionLimiter, source_of


def small_door() -> ConnectionLimiter[str]:
    return ConnectionLimiter(listened_to=2, in_line=4, chance_s=1.0)


def crowd(door: ConnectionLimiter[str], *names: str) -> None:
    """Everybody's source is the first letter of the name."""
    for name in names:
        assert door.arrive(name, name[0]) is None


def test_while_there_is_room_everybody_is_listened_to_at_once() -> None:
    door = small_door()
    crowd(door, "a1", "a2")
    turn = door.turn(0.0)
    assert turn.begin == ("a1", "a2")
    assert turn.cut_off == ()
    assert door.waiting == 0


def test_the_others_wait_until_somebody_has_spoken() -> None:
    door = small_door()
    crowd(door, "a1", "a2", "a3")
    assert door.turn(0.0).begin == ("a1", "a2")
    assert door.turn(0.5).begin == ()
    door.leave("a2")
    door.leave("a2")  # twice does no harm
    assert door.turn(0.5).begin == ("a3",)


def test_those_who_say_nothing_are_cut_off_after_their_chance_if_others_wait() -> None:
    door = small_door()
    crowd(door, "a1", "a2")
    door.turn(0.0)
    assert door.turn(100.0).cut_off == ()  # nobody waits
    crowd(door, "b1")
    turn = door.turn(100.0)
    assert turn.cut_off == ("a1",)
    assert turn.begin == ("b1",)


def test_nobody_is_cut_off_before_having_had_a_chance() -> None:
    door = small_door()
    crowd(door, "a1", "a2", "b1")
    door.turn(0.0)
    turn = door.turn(0.9)
    assert turn.cut_off == ()
    assert turn.begin == ()


def test_a_source_that_floods_the_line_waits_for_itself() -> None:
    door = small_door()
    crowd(door, "a1", "a2", "a3", "a4")
    door.turn(0.0)
    crowd(door, "a5", "b1")
    # After the two of a who are in: a's next and b's first, although a5 came before b1.
    assert door.turn(1.0).begin == ("a3", "b1")


def test_when_the_line_is_full_the_longest_queue_loses_its_last() -> None:
    door = small_door()
    crowd(door, "a1", "a2", "a3", "b1")
    assert door.arrive("c1", "c") == "a3"
    assert door.arrive("a4", "a") == "a4"
    assert door.waiting == 4


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2), st.booleans()), max_size=80))
def test_the_bounds_hold_and_nobody_is_lost_whatever_happens(
    steps: list[tuple[str, float, bool]],
) -> None:
    door = small_door()
    inside: list[str] = []
    waiting: set[str] = set()
    now_s = 0.0
    for number, (source, wait_s, somebody_speaks) in enumerate(steps):
        now_s += wait_s
        name = f"{source}{number}"
        waiting.add(name)
        if turned_away := door.arrive(name, source):
            waiting.remove(turned_away)
        if somebody_speaks and inside:
            door.leave(inside.pop(0))
        turn = door.turn(now_s)
        waiting -= set(turn.begin)
        inside = [one for one in [*inside, *turn.begin] if one not in turn.cut_off]
        assert len(inside) <= 2
        assert door.waiting == len(waiting) <= 4
    door.turn(now_s + 100)
    counts = collections.Counter(inside)
    assert all(count == 1 for count in counts.values())


def test_a_whole_ipv6_network_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:1") != source_of("2001:db8:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth0")
    assert source_of("::ffff:10.0.0.1") == source_of("10.0.0.1") != source_of("10.0.0.2")
