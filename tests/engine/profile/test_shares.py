"""What a trace shows: on a device, every moment of a step has one name, and the shares sum to the step."""

from typing import Any

import pytest

from made_up_profiles import event, kernel, mark
from torchmuster.profile.facts import Trace
from torchmuster.profile.probes.trace import summarize

pytestmark = pytest.mark.engine


def traced(events: list[Any]) -> Trace:
    trace = summarize(events)
    assert trace is not None
    return trace


def in_us(trace: Trace) -> dict[str, float]:
    return {name: round(seconds * 1e6, 3) for name, seconds in trace.shares.items()}


ON_HOST = [
    mark("muster:step#20", 0, 1000),
    mark("muster:data", 0, 200),
    event("aten::copy_", 50, 20),  # of the loader: not the training's computing
    mark("muster:forward", 200, 200),
    event("aten::mm", 210, 150, self_cpu_time_total=130.0),
    event("aten::add", 220, 20),  # within aten::mm
    mark("muster:backward", 400, 400),
    event("autograd::engine::evaluate_function: MmBackward", 400, 200),
    mark("gloo:all_reduce", 500, 300, thread=2),
    mark("muster:optimizer", 800, 50),
    event("aten::add_", 810, 30),
    mark("muster:reads", 850, 40),
    mark("muster:save", 890, 60),
]


ON_DEVICE = [
    mark("muster:step#20", 0, 1000),
    mark("muster:data", 0, 100),
    event("aten::mm", 100, 10),
    kernel("ampere_sgemm_128x64", 120, 200),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 150),
    kernel("Memcpy HtoD (Pinned -> Device)", 460, 10),
    event("cudaStreamSynchronize", 400, 80),
    event("cudaLaunchKernel", 560, 5),
    kernel("vectorized_elementwise_kernel", 570, 130),
    kernel("Optimizer.step#SGD.step", 600, 100, is_user_annotation=True),
]


def test_a_device_that_computes() -> None:
    found = traced(ON_DEVICE)
    assert in_us(found) == {
        "compute": 210.0,  # 180 of the product, 30 before the optimizer
        "overlapped": 20.0,
        "exposed": 130.0,
        "optimizer": 100.0,
        "data": 100.0,  # the device has nothing to do meanwhile
        "reads": 110.0,  # while the host waits, and until the next kernel
        "copies": 10.0,
        "idle": 320.0,
    }
    assert sum(found.shares.values()) == pytest.approx(1000e-6)
    names = [operation.name for operation in found.top]
    assert names == ["ampere_sgemm_128x64", "vectorized_elementwise_kernel"]
    assert in_us(traced(ON_DEVICE[::-1])) == in_us(found), "events may come in any order"


def test_operations_are_counted_without_those_they_call() -> None:
    found = traced(ON_HOST)
    own = {one.name: round(one.self_s * 1e6, 3) for one in found.top}
    assert own["aten::mm"] == 130.0
    assert own["aten::add"] == 20.0
    assert found.messages == 1
    assert found.shares == {}
