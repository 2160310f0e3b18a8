"""The clock of a step: every moment belongs to one phase."""

import pytest

from torchmuster.profile.probes.phases import ForwardPhases, Phases, first_tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_time_inside_another_phase_counts_once() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now_s += 1.0
    phases.enter("data")
    clock.now_s += 2.0
    phases.leave()
    phases.enter("forward")
    clock.now_s += 4.0
    phases.enter("communication")
    clock.now_s += 8.0
    phases.leave()
    clock.now_s += 16.0
    phases.leave()
    step = phases.end(7, profiled=False)
    assert (step.number, step.took_s) == (7, 31.0)
    assert step.seconds == {"data": 2.0, "forward": 20.0, "communication": 8.0}
    assert step.own_s("other") == 1.0


def test_backward_waits_from_its_last_gradient_on() -> None:
    clock = Clock()
    phases = Phases(clock)
    for compute_s, wait_s in ((3.0, 1.0), (3.0, 2.0)):
        with phases.backward():
            clock.now_s += compute_s
            phases.gradient_ready()
            clock.now_s += wait_s
    step = phases.end(1, profiled=False)
    assert (step.seconds["backward"], step.waiting_s, step.times["backward"]) == (9.0, 3.0, 2)


def test_reading_values_shows_only_where_the_script_itself_reads() -> None:
    clock = Clock()
    phases = Phases(clock)
    shows = {}
    for phase in ("forward", "optimizer", "data", "save", "backward"):
        phases.enter(phase)
        shows[phase] = phases.reads_count
        phases.leave()
    assert [phase for phase, one in shows.items() if one] == ["forward"]
    clock.now_s += 1.0
    with phases.inside("reads"):
        clock.now_s += 2.0
    step = phases.end(1, profiled=False)
    assert (step.times["reads"], step.seconds["reads"], step.own_s("other")) == (1, 2.0, 1.0)


def test_what_an_exception_has_ended_is_left() -> None:
    phases = Phases(Clock())
    phases.enter("forward")
    phases.enter("communication")
    phases.leave_all()
    assert phases.current == ""


def test_the_first_tensor_of_a_batch_is_found_in_whatever_it_is_made_of() -> None:
    tensor = torch.zeros(3, 2)
    assert first_tensor({"names": ["a"], "inputs": (tensor, 1)}) is tensor
    assert first_tensor(["a", 1]) is None


def test_what_a_loop_waits_for_data_counts_once() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.begin_wait()
    clock.now_s += 5.0  # an update, after which the loop waits anew
    phases.begin_wait()
    clock.now_s += 1.0
    phases.enter("data")
    clock.now_s += 2.0
    phases.leave()
    clock.now_s += 4.0
    phases.end_wait()
    clock.now_s += 8.0
    step = phases.end(1, profiled=False)
    assert (step.own_s("data"), step.own_s("other")) == (7.0, 13.0)


def test_what_was_waited_before_the_step_is_not_the_steps() -> None:
    clock = Clock()
    phases = Phases(clock)
    phases.begin_wait()
    clock.now_s += 5.0
    phases.begin()
    clock.now_s += 2.0
    phases.end_wait()
    step = phases.end(1, profiled=False)
    assert (step.own_s("data"), step.own_s("other")) == (2.0, 0.0)


@pytest.mark.parametrize("case", ["autocast", "16-bit inputs", "neither"])
def test_the_dtype_of_computation_is_that_of_autocast_or_of_the_inputs(case: str) -> None:
    forward = ForwardPhases(Phases(Clock()))
    forward.find()
    dtype = torch.bfloat16 if case == "16-bit inputs" else torch.float32
    model = torch.nn.Linear(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        model(torch.ones(1, 2, dtype=dtype))
    forward.settle()
    assert forward.lower_dtype == (None if case == "neither" else torch.bfloat16)
