"""Variables that will hurt: of GPUs, interfaces, threads, debugging, other runs, the loader."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import gpu, link, node
from site_packages import surroundings
from torchmuster.devices.model import LinkKind, Node
from torchmuster.diagnose.machine import variables
from torchmuster.finding import Finding, Status

BY_NAME = {check.name: check for check in variables.CHECKS}


def linked() -> Node:
    a, b = gpu(0), gpu(1)
    return node(a, b, links=[link(a, b, LinkKind.NVLINK, 12)])


def ask(check: str, on: Node | None = None, **environment: str) -> list[Finding]:
    return list(BY_NAME[check].run(surroundings(on=on, environment=environment)))


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def test_a_clean_environment_is_well() -> None:
    for check in BY_NAME.values():
        found = only(list(check.run(surroundings(on=linked()))))
        assert found.status is Status.OK
        assert found.what


# ---- switches


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", Status.WARNING),
        ("CUDA_LAUNCH_BLOCKING", "0", Status.OK),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", Status.WARNING),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", Status.OK),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", Status.WARNING),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", Status.WARNING),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", Status.OK),
        ("NCCL_P2P_DISABLE", "1", Status.WARNING),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", Status.WARNING),
    ],
)
def test_switches(variable: str, value: str, status: Status) -> None:
    first = ask("harmful-variables", linked(), **{variable: value})[0]
    assert first.status is status
    if status is not Status.OK:
        assert first.name == "harmful-variable"
        assert first.what == f"{variable}={value} is set"
        assert first.fix == f"unset {variable}"
        assert first.why


def without_infiniband(root: Path, **ports: tuple[str, str]) -> list[Finding]:
    for card, (state, link_layer) in ports.items():
        port = root / "sys/class/infiniband" / card / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link_layer}\n")
    here = surroundings(root=root, environment={"NCCL_IB_DISABLE": "1"})
    return list(BY_NAME["harmful-variables"].run(here))


def test_infiniband_that_is_there_and_not_used(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    found = only(without_infiniband(tmp_path, mlx5_0=("4: ACTIVE", "InfiniBand")))
    assert (found.name, found.status) == ("harmful-variable", Status.WARNING)
    assert "InfiniBand" in found.why
    assert found == snapshot


# ---- GPUs


def test_an_empty_variable_hides_every_gpu(snapshot: SnapshotAssertion) -> None:
    found = only(ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES=""))
    assert (found.name, found.status) == ("gpus-hidden", Status.WARNING)
    assert 'CUDA_VISIBLE_DEVICES=""' in found.what
    assert found == snapshot
    assert found.fix == "unset CUDA_VISIBLE_DEVICES"


def test_a_gpu_that_does_not_exist_and_one_named_twice(snapshot: SnapshotAssertion) -> None:
    found = only(ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES="0,7"))
    assert "GPU 0" in found.what
    assert found == snapshot
    found = only(ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES="1,1"))
    assert "CUDA_VISIBLE_DEVICES=1,1" in found.what
    assert found == snapshot


# ---- interfaces


def test_an_interface_that_is_not_there(snapshot: SnapshotAssertion) -> None:
    found = only(ask("chosen-interfaces", GLOO_SOCKET_IFNAME="ens5q9"))
    assert (found.name, found.status) == ("socket-interface", Status.FAILURE)
    assert "GLOO_SOCKET_IFNAME=ens5q9" in found.what
    assert found.fix.startswith("unset GLOO_SOCKET_IFNAME")


# ---- threads


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "usable_cores", lambda *_: SimpleNamespace(value=16))


@pytest.mark.usefixtures("sixteen_cores")
def test_more_threads_than_cores(snapshot: SnapshotAssertion) -> None:
    found = only(ask("threads", OMP_NUM_THREADS="4096"))
    assert (found.name, found.status) == ("too-many-threads", Status.WARNING)
    assert "OMP_NUM_THREADS=4096" in found.what
    assert found.fix.startswith("unset OMP_NUM_THREADS")
    assert found == snapshot


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize("value", ["many", "0", "-2"])
def test_what_is_no_number_of_threads(value: str, snapshot: SnapshotAssertion) -> None:
    found = only(ask("threads", MKL_NUM_THREADS=value))
    assert f"MKL_NUM_THREADS={value}" in found.what
    assert found == snapshot


# ---- left over


def test_variables_that_another_run_left(snapshot: SnapshotAssertion) -> None:
    found = only(ask("left-over-variables", RANK="0", MASTER_ADDR="10.0.0.1", PET_NNODES="2"))
    assert (found.name, found.status) == ("left-over-variables", Status.WARNING)
    assert "PET_" in found.why
    assert found.evidence == "RANK=0, MASTER_ADDR=10.0.0.1, PET_NNODES=2"
    assert found == snapshot
    assert found.fix == "unset RANK MASTER_ADDR PET_NNODES"


@pytest.mark.parametrize("mark", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "TORCHELASTIC_RUN_ID"])
def test_inside_a_run_they_are_right(mark: str) -> None:
    found = only(ask("left-over-variables", None, RANK="0", WORLD_SIZE="2", **{mark: "1"}))
    assert (found.name, found.status) == ("left-over-variables", Status.OK)
