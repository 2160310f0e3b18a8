"""A trace that PyTorch's profiler has just written is read as the profiler itself counts it."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchmuster.bench.profile import analysis
from torchmuster.bench.profile.trace_events import TraceFile
from torchmuster.bench.profile.trace_lanes import read_lanes

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Return a trace of three steps, and each operation's own seconds as the profiler counts them."""
    path = tmp_path_factory.mktemp("traces") / "rank-0.trace.json"
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as told:
        for number in range(3):
            with record_function(f"muster:step#{number + 20}"):
                with record_function("muster:forward"):
                    loss = model(batch).sum()
                with record_function("muster:backward"):
                    loss.backward()
                with record_function("muster:optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    told.export_chrome_trace(str(path))
    own = {one.key: one.self_cpu_time_total / 1e6 for one in told.key_averages()}
    return path, own


def test_events_are_those_of_the_file(recorded: tuple[Path, dict[str, float]]) -> None:
    path, _ = recorded
    wanted = [
        (one["ph"], one.get("cat"), one["name"])
        for one in json.loads(path.read_bytes())["traceEvents"]
    ]
    read = [(one.ph, one.cat, one.name) for batch in TraceFile(path).batches() for one in batch]
    assert read == wanted


def test_operations_take_as_long_as_the_profiler_says(
    recorded: tuple[Path, dict[str, float]],
) -> None:
    path, own = recorded
    found = analysis.analyse_trace(read_lanes(path))
    assert found.steps == (20, 21, 22)
    names = {one.name for one in found.operations.top}
    assert {"aten::addmm", "aten::mm"} & names
    for one in found.operations.top:
        assert one.self_s * 3 == pytest.approx(own[one.name], rel=0.02, abs=2e-6)
    assert found.shares.part("optimizer") > 0
    assert found.shares.part("compute") > 0
    assert found.memory
