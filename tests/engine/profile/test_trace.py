"""Events that PyTorch's profiler has just recorded are counted as the profiler itself counts them."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchmuster.profile.probes.trace import summarize

pytestmark = pytest.mark.engine


def test_operations_take_as_long_as_the_profiler_says() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        for number in range(3):
            with record_function(f"muster:step#{number + 20}"):
                with record_function("muster:forward"):
                    loss = model(batch).sum()
                with record_function("muster:backward"):
                    loss.backward()
                with record_function("muster:optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    trace = summarize(recorded.events() or [])
    assert trace is not None
    assert trace.steps == 3
    own_s = {entry.key: entry.self_cpu_time_total / 1e6 for entry in recorded.key_averages()}
    assert {"aten::addmm", "aten::mm"} & {operation.name for operation in trace.top}
    for operation in trace.top:
        assert operation.self_s * 3 == pytest.approx(own_s[operation.name], rel=0.02, abs=2e-6)
