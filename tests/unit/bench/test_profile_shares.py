"""What a trace shows: every moment of a step has one name, and the shares sum to the step."""

from pathlib import Path
from typing import Any

import pytest

from made_up_profiles import event, mark, write_trace
from torchmuster.bench.profile import analysis, shares
from torchmuster.bench.profile.trace_lanes import TraceLanes, read_lanes


def lanes(tmp_path: Path, events: list[dict[str, Any]], **how: Any) -> TraceLanes:
    return read_lanes(write_trace(tmp_path / "t.json", events), **how)


def in_us(found: shares.Shares, steps: int = 1) -> dict[str, float]:
    return {name: round(one * 1e6 * steps, 3) for name, one in found.by_name().items() if one}


ON_HOST = [
    mark("muster:step#20", 0, 1000),
    mark("muster:data", 0, 200),
    event("aten::copy_", 50, 20),  # of the loader: not the training's computing
    mark("muster:forward", 200, 200),
    event("aten::mm", 210, 150),
    event("aten::add", 220, 20),  # within aten::mm
    mark("muster:backward", 400, 400),
    event("autograd::engine::evaluate_function: MmBackward", 400, 200),
    mark("gloo:all_reduce", 500, 300, thread=2),
    mark("muster:optimizer", 800, 50),
    event("aten::add_", 810, 30),
    mark("muster:read", 850, 40),
    mark("muster:save", 890, 60),
]


def test_a_host_that_computes(tmp_path: Path) -> None:
    found = shares.shares_of_trace(lanes(tmp_path, ON_HOST))
    assert in_us(found) == {
        "compute": 250.0,  # 150 in forward, 100 in backward
        "overlapped": 100.0,
        "exposed": 200.0,
        "optimizer": 50.0,
        "data": 200.0,
        "reads": 40.0,
        "save": 60.0,
        "idle": 100.0,
    }
    assert found.total_s == pytest.approx(1000e-6)
    assert found.part("exposed") == pytest.approx(0.2)


def kernel(name: str, begin: float, length: float, stream: int = 7, cat: str = "kernel") -> Any:
    return event(name, begin, length, cat=cat, thread=stream, args={"stream": stream})


ON_DEVICE = [
    mark("ProfilerStep#4", 0, 1000),
    mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100),
    event("aten::mm", 100, 10),
    kernel("ampere_sgemm_128x64", 120, 200),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 150, stream=20),
    kernel("Memcpy HtoD (Pinned -> Device)", 460, 10, cat="gpu_memcpy"),
    event("cudaStreamSynchronize", 400, 80, cat="cuda_runtime"),
    event("cudaLaunchKernel", 560, 5, cat="cuda_runtime"),
    kernel("vectorized_elementwise_kernel", 570, 130),
    kernel("Optimizer.step#SGD.step", 600, 100, cat="gpu_user_annotation"),
]


def test_a_device_that_computes(tmp_path: Path) -> None:
    found = shares.shares_of_trace(lanes(tmp_path, ON_DEVICE))
    assert in_us(found) == {
        "compute": 210.0,  # 180 of the product, 30 before the optimizer
        "overlapped": 20.0,
        "exposed": 130.0,
        "optimizer": 100.0,
        "data": 100.0,  # the device has nothing to do meanwhile
        "reads": 100.0,  # from the copy's end, in the midst of the host's wait, to the next kernel
        "copies": 10.0,
        "idle": 330.0,
    }
    assert found.total_s == pytest.approx(1000e-6)


def test_shares_of_a_rank_that_computes_on_its_device_are_those_of_the_device(
    tmp_path: Path,
) -> None:
    found = analysis.analyse_trace(lanes(tmp_path, ON_DEVICE))
    assert found.on_device
    assert [one.name for one in found.operations.top] == [
        "ampere_sgemm_128x64",
        "vectorized_elementwise_kernel",
    ]
    assert found.operations.smallness is not None
    assert not found.operations.smallness.bound


def test_operations_are_counted_without_those_they_call(tmp_path: Path) -> None:
    found = analysis.analyse_trace(lanes(tmp_path, ON_HOST))
    own = {one.name: round(one.self_s * 1e6, 3) for one in found.operations.top}
    assert own["aten::mm"] == 130.0
    assert own["aten::add"] == 20.0
    assert found.messages == 1
    assert found.passes is not None
    beside, unused = found.passes
    assert beside == pytest.approx(100 / 400)  # of 600 less the 200 that were only waiting
    assert unused == pytest.approx(50 / 400)


def test_a_step_of_nothing_but_tiny_operations_is_launch_bound(tmp_path: Path) -> None:
    tiny = [event("aten::add", 10 * at, 5) for at in range(90)]
    found = analysis.analyse_trace(lanes(tmp_path, [mark("muster:step#3", 0, 1000), *tiny]))
    small = found.operations.smallness
    assert small is not None
    assert small.bound
    assert small.calls == 90
    assert small.median_s == pytest.approx(5e-6, rel=0.05)


def test_events_may_come_in_any_order(tmp_path: Path) -> None:
    there = shares.shares_of_trace(lanes(tmp_path, ON_HOST))
    assert in_us(shares.shares_of_trace(lanes(tmp_path, ON_HOST[::-1]))) == in_us(there)


def test_a_trace_without_marked_steps_is_one_step(tmp_path: Path) -> None:
    found = lanes(tmp_path, [event("aten::mm", 0, 60), event("aten::mm", 80, 20)])
    assert [step.number for step in found.steps] == [None]
    assert in_us(shares.shares_of_trace(found)) == {"compute": 80.0, "idle": 20.0}


def test_more_than_may_be_held_lets_the_last_steps_go(tmp_path: Path) -> None:
    events = []
    for number in range(4):
        events.append(mark(f"muster:step#{20 + number}", 1000 * number, 1000))
        events += [event("aten::mm", 1000 * number + 10 * at, 5) for at in range(100)]
    found = lanes(tmp_path, events, most_held=250)
    assert [step.number for step in found.steps] == [20, 21]
    assert found.left_out == (22, 23)
    assert not found.shortened
    assert in_us(shares.shares_of_trace(found)) == {"compute": 500.0, "idle": 500.0}


def test_a_step_that_is_more_than_may_be_held_is_looked_at_from_its_beginning(
    tmp_path: Path,
) -> None:
    events = [event("aten::mm", 10 * at, 5) for at in range(1000)]
    found = lanes(tmp_path, [mark("muster:step#3", 0, 10_000), *events], most_held=300)
    assert found.shortened
    assert sum(step.held for step in found.steps) == 250
    assert in_us(shares.shares_of_trace(found)) == {"compute": 1250.0, "idle": 1250.0}


def test_memory_over_time_is_the_devices_if_there_is_one(tmp_path: Path) -> None:
    def held(at: float, device_type: int, size: int) -> dict[str, Any]:
        args = {"Total Allocated": size, "Device Type": device_type}
        return {"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": 1000.0 + at, "args": args}

    host = [held(100, 0, 5), held(500, 0, 70)]
    step = mark("muster:step#20", 0, 1000)
    found = lanes(tmp_path, [step, *host]).memory.points()
    assert [size for _, size in found] == [5, 70]
    assert found[0][0] == pytest.approx(100e-6, abs=2e-6)
    device = [held(200, 1, 1000), held(200.1, 1, 3000), held(2000, 1, 9)]
    found = lanes(tmp_path, [step, *host, *device]).memory.points()
    assert [size for _, size in found] == [3000]


def test_one_step_is_drawn_as_it_went(tmp_path: Path) -> None:
    picture = analysis.analyse_trace(lanes(tmp_path, ON_HOST)).picture
    assert picture is not None
    assert picture.step == 20
    assert [one.name for one in picture.doing][:3] == ["data", "idle", "compute"]
    assert picture.doing[0].end_s == pytest.approx(200e-6, abs=5e-6)
    assert [one.name for one in picture.sending] == ["sending"]
