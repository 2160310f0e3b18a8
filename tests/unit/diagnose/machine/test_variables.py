"""Variables that will hurt: of GPUs, interfaces, threads, debugging, other runs, the loader."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import gpu, link, node
from site_packages import SitePackages, surroundings
from torchmuster.devices.model import LinkKind, Node
from torchmuster.diagnose.machine import library_path, variables
from torchmuster.finding import Finding, Status

BY_NAME = {check.name: check for check in (*variables.CHECKS, *library_path.CHECKS)}


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
        ("NCCL_SHM_DISABLE", "1", Status.WARNING),
        ("NVIDIA_TF32_OVERRIDE", "1", Status.WARNING),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", Status.WARNING),
        ("NCCL_DEBUG", "INFO", Status.NOTE),
        ("NCCL_DEBUG", "WARN", Status.OK),
        ("NCCL_PROTO", "LL128", Status.NOTE),
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


def test_p2p_may_be_off_where_there_is_no_nvlink() -> None:
    found = ask("harmful-variables", node(gpu(0), gpu(1)), NCCL_P2P_DISABLE="1")
    assert [one.status for one in found] == [Status.OK]


def without_infiniband(root: Path, **ports: tuple[str, str]) -> list[Finding]:
    for card, (state, link_layer) in ports.items():
        port = root / "sys/class/infiniband" / card / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link_layer}\n")
    here = surroundings(root=root, environment={"NCCL_IB_DISABLE": "1"})
    return list(variables.HARMFUL_CHECKS[0].run(here))


def test_infiniband_that_is_there_and_not_used(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    found = only(without_infiniband(tmp_path, mlx5_0=("4: ACTIVE", "InfiniBand")))
    assert (found.name, found.status) == ("harmful-variable", Status.WARNING)
    assert "InfiniBand" in found.why
    assert found == snapshot


@pytest.mark.parametrize("port", [("4: ACTIVE", "Ethernet"), ("1: DOWN", "InfiniBand")])
def test_a_card_that_may_carry_no_infiniband_is_a_note(
    tmp_path: Path, port: tuple[str, str]
) -> None:
    noted, well = without_infiniband(tmp_path, mlx5_0=port)
    assert (noted.name, noted.status) == ("harmful-variable", Status.NOTE)
    assert "RoCE" in noted.why
    assert well.status is Status.OK


def test_where_there_is_no_infiniband_it_may_be_off(tmp_path: Path) -> None:
    assert only(without_infiniband(tmp_path)).status is Status.OK


def test_an_option_of_the_allocator_that_is_misspelt(snapshot: SnapshotAssertion) -> None:
    setting = "expandable_segment:True,max_split_size_mb:128"
    found = only(ask("harmful-variables", linked(), PYTORCH_CUDA_ALLOC_CONF=setting))
    assert (found.name, found.status) == ("unknown-allocator-option", Status.WARNING)
    assert "expandable_segments " in found.fix
    assert found == snapshot


def test_an_option_that_a_newer_torch_may_have_is_a_note() -> None:
    found = ask("harmful-variables", linked(), PYTORCH_ALLOC_CONF="quite_new:1")
    assert found[0].status is Status.NOTE


@pytest.mark.parametrize(
    "setting",
    ["expandable_segments:True", "roundup_power2_divisions:[256:1,512:2,>:4],backend:native", ""],
)
def test_options_that_the_allocator_has(setting: str) -> None:
    found = only(ask("harmful-variables", linked(), PYTORCH_CUDA_ALLOC_CONF=setting))
    assert found.status is Status.OK


# ---- GPUs


def test_an_empty_variable_hides_every_gpu(snapshot: SnapshotAssertion) -> None:
    found = only(ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES=""))
    assert (found.name, found.status) == ("gpus-hidden", Status.WARNING)
    assert 'CUDA_VISIBLE_DEVICES=""' in found.what
    assert found == snapshot
    assert found.fix == "unset CUDA_VISIBLE_DEVICES"


def test_gpus_that_are_hidden_on_purpose_are_a_note() -> None:
    found = ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES="-1")
    assert [one.status for one in found] == [Status.NOTE, Status.OK]


def test_a_gpu_that_does_not_exist_and_one_named_twice(snapshot: SnapshotAssertion) -> None:
    found = only(ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES="0,7"))
    assert "GPU 0" in found.what
    assert found == snapshot
    found = only(ask("visible-devices", linked(), CUDA_VISIBLE_DEVICES="1,1"))
    assert "CUDA_VISIBLE_DEVICES=1,1" in found.what
    assert found == snapshot


def test_the_variable_does_not_matter_without_gpus() -> None:
    assert only(ask("visible-devices", CUDA_VISIBLE_DEVICES="0,1")).status is Status.OK


# ---- interfaces


def test_an_interface_that_is_not_there(snapshot: SnapshotAssertion) -> None:
    found = only(ask("chosen-interfaces", GLOO_SOCKET_IFNAME="ens5q9"))
    assert (found.name, found.status) == ("socket-interface", Status.FAILURE)
    assert "GLOO_SOCKET_IFNAME=ens5q9" in found.what
    assert found.fix.startswith("unset GLOO_SOCKET_IFNAME")


def test_loopback_works_on_this_machine_alone(snapshot: SnapshotAssertion) -> None:
    found = only(ask("chosen-interfaces", GLOO_SOCKET_IFNAME="lo"))
    assert (found.name, found.status) == ("socket-interface", Status.WARNING)
    assert "GLOO_SOCKET_IFNAME=lo" in found.what


def test_nccls_choice_matters_with_gpus_only() -> None:
    assert only(ask("chosen-interfaces", NCCL_SOCKET_IFNAME="ens5q9")).status is Status.OK
    found = only(ask("chosen-interfaces", linked(), NCCL_SOCKET_IFNAME="ens5q9"))
    assert found.status is Status.FAILURE


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


def test_one_thread_is_what_torchrun_sets() -> None:
    assert ask("threads", OMP_NUM_THREADS="1")[-1].status is Status.OK


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


# ---- the loader


def loader(site: SitePackages, folder: Path, **environment: str) -> list[Finding]:
    environment = {"LD_LIBRARY_PATH": f"/nowhere:{folder}", **environment}
    return list(BY_NAME["library-path"].run(surroundings(site, environment=environment)))


@pytest.mark.parametrize(
    ("cuda", "library", "status"),
    [
        ("12.6", "libnccl.so.2", Status.NOTE),
        ("12.6", "libcudnn.so.9", Status.NOTE),
        ("12.6", "libtorch_cpu.so", Status.NOTE),
        (None, "libnccl.so.2", Status.OK),
        (None, "libtorch_cpu.so", Status.WARNING),
        ("12.6", "libcudart.so.12", Status.NOTE),
        (None, "libstdc++.so.6", Status.NOTE),
        ("12.6", "libfoo.so", Status.OK),
    ],
)
def test_libraries_that_come_before_torchs(
    tmp_path: Path, cuda: str | None, library: str, status: Status, snapshot: SnapshotAssertion
) -> None:
    site, folder = SitePackages(tmp_path / "site"), tmp_path / "lib"
    site.torch(cuda=cuda)
    folder.mkdir()
    (folder / library).touch()
    found = only(loader(site, folder))
    assert (found.name, found.status) == ("library-path", status)
    if status is not Status.OK:
        assert library in found.what
        assert found.evidence == str(folder / library)
        assert found.fix.startswith("unset LD_LIBRARY_PATH")
        assert found == snapshot


def test_torchs_own_folder_in_the_library_path_is_right(tmp_path: Path) -> None:
    site = SitePackages(tmp_path)
    folder = site.torch() / "lib"
    assert only(loader(site, folder)).status is Status.OK


def test_the_lib_that_torch_is_installed_below_is_right(tmp_path: Path) -> None:
    site = SitePackages(tmp_path / "env/lib/python3.11/site-packages")
    site.torch()
    (tmp_path / "env/lib/libtorch_cpu.so").touch()
    (tmp_path / "env/lib/libstdc++.so.6").touch()
    assert only(loader(site, tmp_path / "env/lib")).status is Status.OK


def test_a_preloaded_library_is_a_note_without_secrets(tmp_path: Path) -> None:
    site = SitePackages(tmp_path)
    site.torch()
    value = "/opt/a.so --token=hf_0123456789abcdefghij"
    found = only(loader(site, tmp_path / "none", LD_PRELOAD=value))
    assert (found.name, found.status) == ("preloaded-library", Status.NOTE)
    assert "hf_0123" not in found.what
