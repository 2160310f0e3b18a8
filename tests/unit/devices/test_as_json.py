"""``--json``: plain types on every machine, and keys that programs rely on."""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings

from device_strategies import Situation, busy, claim, gpu, node, situations, split
from nvml_stub.scenarios import gpu_uuid
from torchmuster.devices.as_json import node_as_json
from torchmuster.devices.model import Ecc, Node
from torchmuster.devices.request import Claim
from torchmuster.devices.visibility import visible

NODE = {
    "accelerators",
    "cpu",
    "cuda_version",
    "driver_version",
    "findings",
    "hostname",
    "links",
    "taken_unix_s",
}
DEVICE = {
    "compute_capability",
    "compute_prohibited",
    "ecc",
    "energy_j",
    "free_bytes",
    "index",
    "kind",
    "mig_enabled",
    "mig_index",
    "name",
    "number",
    "parent_uuid",
    "pci_bus_id",
    "power_limit_w",
    "power_w",
    "processes",
    "slowdown_temperature_c",
    "temperature_c",
    "throttled_by",
    "total_bytes",
    "trouble",
    "used_bytes",
    "reserved_bytes",
    "utilization_percent",
    "uuid",
}
ACCELERATOR = DEVICE | {"claim", "hidden_by", "in_use", "visible"}
PROCESS = {
    "command",
    "compute",
    "cpu_s",
    "idle_s",
    "memory_bytes",
    "pid",
    "started_unix_s",
    "user",
    "utilization_percent",
}
FINDING = {"evidence", "fix", "name", "status", "what", "why"}


def as_json(
    machine: Node,
    environment: Mapping[str, str] | None = None,
    claims: Mapping[str, Claim] | None = None,
) -> dict[str, Any]:
    """What a program reads: written and read again, without the numbers JSON does not have."""
    shown = visible(machine.accelerators, environment or {})
    text = json.dumps(node_as_json(machine, shown, claims or {}), allow_nan=False)
    read: dict[str, Any] = json.loads(text)
    return read


def assert_keys(read: Mapping[str, Any]) -> None:
    assert read.keys() == NODE
    assert read["cpu"].keys() == DEVICE
    for one in read["accelerators"]:
        assert one.keys() == ACCELERATOR
        assert all(process.keys() == PROCESS for process in one["processes"])
        assert one["ecc"] is None or one["ecc"].keys() == {"enabled", "corrected", "uncorrected"}
    assert all(one.keys() == {"a", "b", "kind", "lanes"} for one in read["links"])
    assert all(one.keys() == FINDING for one in read["findings"])


@settings(max_examples=50, deadline=None)
@given(situations())
def test_any_snapshot_can_be_written(case: Situation) -> None:
    assert_keys(as_json(case.node, case.environment, case.claims))


def test_values_are_plain_and_complete() -> None:
    whole = busy(gpu(1, ecc=Ecc(enabled=True, corrected=0, uncorrected=0)), "alice")
    machine = node(*split(gpu(0), 7), whole, driver_version="570.86.15", cuda_version="12.8")
    read = as_json(machine, claims={gpu_uuid(1): claim()})
    parent, slice_, taken = read["accelerators"]
    assert (read["hostname"], read["taken_unix_s"]) == ("box", 1_700_000_000.0)
    assert (read["driver_version"], read["cuda_version"]) == ("570.86.15", "12.8")
    assert (taken["kind"], taken["compute_capability"]) == ("cuda", [8, 0])
    assert (taken["free_bytes"], taken["in_use"]) == (60 * 1024**3, True)
    assert taken["claim"] == {
        "pid": 77,
        "user": "carol",
        "command": "python train.py",
        "since_unix_s": 1_700_000_000.0,
    }
    assert [one["user"] for one in taken["processes"]] == ["alice"]
    assert (slice_["number"], slice_["parent_uuid"]) == ("0:0", parent["uuid"])
    assert (slice_["claim"], slice_["in_use"]) == (None, False)
    assert (parent["visible"], slice_["visible"], taken["visible"]) == (False, True, True)
