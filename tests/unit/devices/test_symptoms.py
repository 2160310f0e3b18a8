"""What a snapshot shows its owner without being asked."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import gpu, node, split
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Ecc
from torchmuster.devices.snapshot import orphans_of, symptoms_of
from torchmuster.finding import Status
from torchmuster.units import GiB, MiB

CONTEXT = 500 * MiB


def rank(pid: int, memory: int | None, compute: bool = True) -> DeviceProcess:
    return DeviceProcess(pid=pid, compute=compute, memory_bytes=memory)


def ranks_that_touched_gpu_0(count: int) -> list[Device]:
    """One process at home on each GPU; all but the first also opened a context on GPU 0."""
    home = [gpu(index, processes=(rank(100 + index, 30 * GiB),)) for index in range(count)]
    strays = tuple(rank(100 + index, CONTEXT) for index in range(1, count))
    return [replace(home[0], processes=(*home[0].processes, *strays)), *home[1:]]


def test_contexts_that_every_rank_opened_on_the_first_gpu(snapshot: SnapshotAssertion) -> None:
    (finding,) = symptoms_of(node(*ranks_that_touched_gpu_0(4)))
    assert finding.name == "stray-contexts"
    assert finding.status is Status.WARNING
    assert "1.5 GiB on GPU 0" in finding.what
    assert "torch.cuda.set_device(local_rank)" in finding.fix
    assert finding.evidence == "pids 101, 102, 103"
    assert finding == snapshot


def test_processes_that_work_on_all_gpus_mean_it() -> None:
    everywhere = (rank(100, CONTEXT), rank(101, CONTEXT))
    first = gpu(0, processes=everywhere)
    others = [
        gpu(index, processes=tuple(replace(one, memory_bytes=30 * GiB) for one in everywhere))
        for index in range(1, 8)
    ]
    assert symptoms_of(node(first, *others)) == ()


def test_a_split_gpu_repeats_its_slices_processes_and_that_is_no_symptom() -> None:
    parent, first, second = split(gpu(0), 40 * GiB, 40 * GiB)
    listed = (rank(100, CONTEXT), rank(101, CONTEXT))
    work = tuple(replace(one, memory_bytes=30 * GiB) for one in listed)
    devices = [
        replace(parent, processes=listed),
        replace(first, processes=work[:1]),
        replace(second, processes=work[1:]),
    ]
    assert symptoms_of(node(*devices)) == ()


@pytest.mark.parametrize("count", [1, 3])
def test_memory_errors_that_were_not_corrected(count: int, snapshot: SnapshotAssertion) -> None:
    failing = gpu(2, ecc=Ecc(enabled=True, corrected=9, uncorrected=count))
    (finding,) = symptoms_of(node(failing))
    assert finding.name == "ecc-uncorrected"
    assert finding.status is Status.WARNING
    assert f" {count} " in finding.what
    assert finding.fix.startswith("sudo nvidia-smi -r -i 2 ")
    assert finding == snapshot


def test_an_amd_gpu_is_reset_with_amds_own_tool() -> None:
    failing = gpu(2, kind=DeviceKind.ROCM, ecc=Ecc(enabled=True, uncorrected=1))
    (finding,) = symptoms_of(node(failing))
    assert finding.fix.startswith("sudo amd-smi reset --gpureset --gpu 2  # ")


@pytest.mark.parametrize(
    "ecc",
    [
        None,
        Ecc(enabled=False),
        Ecc(enabled=True, corrected=12, uncorrected=0),
        Ecc(enabled=True, corrected=None, uncorrected=None),
    ],
)
def test_errors_that_were_corrected_or_are_not_counted(ecc: Ecc | None) -> None:
    assert symptoms_of(node(gpu(0, ecc=ecc))) == ()


def test_a_gpu_that_is_slowed_down_by_heat(snapshot: SnapshotAssertion) -> None:
    hot = gpu(
        1,
        temperature_c=91,
        slowdown_temperature_c=89,
        throttled_by=("power limit", "heat (hardware)"),
    )
    (finding,) = symptoms_of(node(hot))
    assert finding.name == "gpu-hot"
    assert finding.status is Status.WARNING
    assert "91 °C" in finding.what
    assert "89 °C" in finding.why
    assert "sudo nvidia-smi -i 1 -pl" in finding.fix
    assert finding.evidence == "heat (hardware)"
    assert finding == snapshot


def test_a_look_at_the_machine_tells_its_symptoms(machine: Callable[[Scenario], Path]) -> None:
    scenario = scenarios.eight_a100_idle()
    scenario["devices"][5]["ecc"]["uncorrected"] = 2
    scenario["devices"][6]["throttle_reasons"] = 0x40
    scenario["devices"][7]["lost"] = True
    machine(scenario)
    names = [finding.name for finding in snapshot.take_snapshot().findings]
    assert names == ["gpu-unreachable", "ecc-uncorrected", "gpu-hot"]


def left_behind(pid: int, user: str | None, **changes: object) -> DeviceProcess:
    usual = DeviceProcess(
        pid=pid,
        compute=True,
        memory_bytes=12 * GiB,
        user=user,
        command="python train.py",
        idle_s=1200.0,
        orphaned=True,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def test_an_idle_process_without_a_parent_is_named_with_its_owner(
    snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchmuster.devices.processes.user_of_this_process", lambda: "ana")
    mine, other = left_behind(41, "ana"), left_behind(42, "eva")
    found = list(
        orphans_of(node(gpu(0, processes=(mine,)), gpu(1, processes=(mine, other)), gpu(2)))
    )
    assert [one.name for one in found] == ["orphan-process", "orphan-process"]
    assert "24.0 GiB on GPUs 0, 1" in found[0].what
    assert found[0].fix == "kill 41"
    assert "eva" in found[1].what
    assert found[1].fix.endswith("kill 42")
    assert found == snapshot


@pytest.mark.parametrize(
    "changes", [{"orphaned": False}, {"orphaned": None}, {"idle_s": 599.0}, {"idle_s": None}]
)
def test_a_process_that_works_or_has_a_parent_is_not_left_behind(
    changes: dict[str, object],
) -> None:
    assert list(orphans_of(node(gpu(0, processes=(left_behind(41, "ana", **changes),))))) == []
