"""A node registry of up to 10,000 machines: time, memory and messages grow in step with their number."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import GIVE_UP_S

CROWD = Path(__file__).with_name("registry_crowd.py")

LARGEST = int(os.environ.get("ROLL_CALL_NODES", "10000"))
SIZES = [size for size in (100, 1000) if size < LARGEST] + [LARGEST]


def registry(nodes: int) -> dict[str, Any]:
    host = subprocess.Popen(
        [sys.executable, CROWD, "host", str(nodes)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its crowds end with it
    )
    try:
        printed, _ = host.communicate(timeout=GIVE_UP_S)
    except subprocess.TimeoutExpired:
        os.killpg(host.pid, signal.SIGKILL)
        host.communicate()
        raise
    assert host.returncode == 0
    told: dict[str, Any] = json.loads(printed)
    return told


def table(results: list[dict[str, Any]]) -> str:
    head = (
        f"{'machines':>8} {'seconds':>8} {'host CPU s':>10} {'KiB each':>8} {'messages each':>13}"
    )
    rows = [
        f"{one['nodes']:>8} {one['seconds']:>8.2f} {one['host_cpu_seconds']:>10.2f} "
        f"{one['memory_per_node_bytes'] / 1024:>8.1f} {one['messages_per_node']:>13g}"
        for one in results
    ]
    return "\n".join([head, *rows])


@pytest.mark.stress
@pytest.mark.alone
def test_a_registry_costs_in_step_with_the_number_of_machines() -> None:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < LARGEST + 1024:
        pytest.fail(f"at most {files} files may be open; run with ROLL_CALL_NODES={files - 1024}")
    results = [registry(size) for size in SIZES]
    print("\n" + table(results))
    for one in results:
        assert one["started"] == one["nodes"]
        assert one["still_missing"] == 0
        assert not [event for event in one["events"] if "was lost" in event]
        assert one["messages_per_node"] == 6
    smaller, larger = results[-2:]
    growth = larger["nodes"] / smaller["nodes"]
    # Ten times the machines would cost a hundred times as much if each depended on all others. This
    # is the host's processor time: seconds by the clock depend on who else uses the cores.
    assert larger["host_cpu_seconds"] / smaller["host_cpu_seconds"] < 1.6 * growth
    assert larger["memory_per_node_bytes"] < 64 * 1024
    assert larger["memory_per_node_bytes"] < 1.5 * smaller["memory_per_node_bytes"]
