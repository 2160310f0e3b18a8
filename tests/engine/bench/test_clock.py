"""Things are timed in turns: drift is everybody's, samples are long enough, the first call does not count."""

import statistics
from collections.abc import Callable

import pytest
import torch
from torch.utils.benchmark import Timer

from made_up_worlds import made_up_world
from torchmuster.bench.probes.clock import interleaved, interleaved_on_ranks

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")


class Machine:
    """A clock that only work moves; it gets slower with time, as a machine that gets hot."""

    def __init__(self, slowing: float = 0.0) -> None:
        self.now_s = 0.0
        self.slowing = slowing
        self.calls: list[str] = []

    def turn(self, name: str, seconds: float, first_s: float = 0.0) -> Callable[[], None]:
        waiting = [first_s]

        def work() -> None:
            self.calls.append(name)
            self.now_s += (seconds + (waiting.pop() if waiting else 0.0)) * (
                1 + self.slowing * self.now_s
            )

        return work

    def time(self) -> float:
        return self.now_s


def test_each_sample_is_seconds_per_call_without_the_first_one() -> None:
    machine = Machine()
    turns = {"short": machine.turn("short", 1e-4, first_s=5.0), "long": machine.turn("long", 0.5)}
    found = interleaved(turns, device=CPU, rounds=7, clock=machine.time)
    assert found["short"] == pytest.approx([1e-4] * 7)
    assert found["long"] == pytest.approx([0.5] * 7)


def test_a_sample_lasts_long_enough_and_no_longer() -> None:
    machine = Machine()
    interleaved({"a": machine.turn("a", 1e-4)}, device=CPU, rounds=0, clock=machine.time)
    warm_up = len(machine.calls)
    machine = Machine()
    interleaved({"a": machine.turn("a", 1e-4)}, device=CPU, rounds=10, clock=machine.time)
    # 0.01 s, and one call before each sample that does not count.
    assert (len(machine.calls) - warm_up) / 10 == pytest.approx(101, abs=1)


def test_a_slow_first_call_makes_no_short_samples_on_ranks() -> None:
    machine = Machine()
    turns = {"a": machine.turn("a", 1e-4, first_s=5.0)}

    def ask(rounds: int) -> int:
        machine.calls.clear()
        interleaved_on_ranks(turns, world=made_up_world(), rounds=rounds, clock=machine.time)
        return len(machine.calls)

    warm_up = ask(rounds=0)
    # 0.01 s, and one call before each sample that does not count.
    assert (ask(rounds=10) - warm_up) / 10 == pytest.approx(101, abs=1)


def test_long_calls_of_ranks_make_a_sample_of_several() -> None:
    machine = Machine()
    turns = {"a": machine.turn("a", 1.0)}

    def ask(rounds: int) -> int:
        machine.calls.clear()
        interleaved_on_ranks(
            turns, world=made_up_world(), rounds=rounds, least_calls=4, clock=machine.time
        )
        return len(machine.calls)

    warm_up = ask(rounds=0)
    assert (ask(rounds=10) - warm_up) / 10 == 4 + 1


def test_warming_up_lasts_as_long_as_it_should() -> None:
    machine = Machine()
    interleaved(
        {"a": machine.turn("a", 1e-3)}, device=CPU, rounds=0, warm_up_s=0.2, clock=machine.time
    )
    assert 0.2 <= machine.now_s < 0.5


def test_every_round_has_each_turn_once_in_a_drawn_order() -> None:
    machine = Machine()
    turns = {name: machine.turn(name, 0.02) for name in "abc"}
    interleaved(turns, device=CPU, rounds=20, warm_up_s=0.0, clock=machine.time)
    rounds = [tuple(machine.calls[-60:][at : at + 3]) for at in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 3


def test_a_machine_that_slows_down_makes_no_difference_between_equal_things() -> None:
    machine = Machine(slowing=0.1)  # a tenth more each second, and it takes ten
    turns = {name: machine.turn(name, 0.05) for name in "abcd"}
    found = interleaved(turns, device=CPU, rounds=30, clock=machine.time)
    medians = [statistics.median(some) for some in found.values()]
    assert max(found["a"]) > 1.3 * min(found["a"])
    assert max(medians) < 1.05 * min(medians)


def test_what_is_done_is_told() -> None:
    heard: list[str] = []
    machine = Machine()
    interleaved(
        {"a": machine.turn("a", 0.1)}, device=CPU, rounds=2, say=heard.append, clock=machine.time
    )
    assert heard == ["warming up: a", "round 1 of 2", "round 2 of 2"]


@pytest.mark.nightly
@pytest.mark.alone
def test_a_product_takes_about_as_long_as_pytorchs_own_timer_says() -> None:
    """A wrong time here is wrong by whole calls."""
    matrix = torch.randn(384, 384)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = min(interleaved({"a": lambda: matrix @ matrix}, device=CPU, rounds=20)["a"])
        timer = Timer("a @ a", globals={"a": matrix}, num_threads=1)
        theirs = min(timer.blocked_autorange(min_run_time=0.4).times)
    finally:
        torch.set_num_threads(threads)
    assert theirs / 2 < ours < theirs * 2
