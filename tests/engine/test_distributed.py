"""The classic functions of GPU selection, on the stand-in and without any GPU.

There is no GPU where the tests run, so where a function asks torch what it can use, the answer is
given by the fixture ``torch_with_gpus``; all the rest is real.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario, gpu_uuid
from torchmuster import distributed
from torchmuster.errors import (
    CudaAlreadyInitialized,
    DevicesBusy,
    MusterError,
    NoSuchDevice,
    TooFewDevices,
)

pytestmark = pytest.mark.engine

Machine = Callable[[Scenario], Path]


@pytest.fixture
def torch_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: usable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def visible_now() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def restored_environment(own_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions write to the environment on purpose; the next test must not see it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "restored afterwards")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_available_gpus_are_nvidia_smis_numbers(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    assert distributed.get_available_gpus() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("2,3,5,7", [2, 3, 5, 7]), ("1", [1]), ("", []), (gpu_uuid(4), [4]), (gpu_uuid(4)[:8], [4])],
)
def test_only_visible_gpus_are_available(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str, expected: list[int]
) -> None:
    machine(scenarios.eight_a100_idle())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert distributed.get_available_gpus() == expected


def test_select_by_ids_count_memory_and_all(machine: Machine) -> None:
    machine(scenarios.mixed_consumer())
    assert distributed.select_gpus(gpu_ids=[0, 2]) == [0, 2]
    assert distributed.select_gpus() == [0, 1, 2, 3]
    assert distributed.select_gpus(min_memory_mb=20000) == [1, 2, 3]
    assert distributed.select_gpus(num_gpus=2) == [2, 3]


def test_select_by_number_takes_the_least_loaded_and_says_why(
    machine: Machine, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.eight_a100())
    with caplog.at_level(logging.INFO, "torchmuster"):
        chosen = distributed.select_gpus(num_gpus=2)
    assert chosen == [6, 7]
    assert chosen.reason in caplog.text
    assert chosen.reason == snapshot


def test_select_refuses_what_cannot_be(machine: Machine, snapshot: SnapshotAssertion) -> None:
    machine(scenarios.eight_a100())
    with pytest.raises(NoSuchDevice, match="GPU 8 ") as refused:
        distributed.select_gpus(gpu_ids=[8])  # S2.8: invalid device ordinal
    assert refused.value.why == snapshot
    with pytest.raises(DevicesBusy, match="3 GPUs") as busy:
        distributed.select_gpus(num_gpus=3)
    assert busy.value.what == snapshot
    with pytest.raises(TooFewDevices, match="9 GPUs"):
        distributed.select_gpus(num_gpus=9)


def test_a_gpu_claimed_by_another_process_is_not_selected(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    program = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-m", "torchmuster", "gpus", "pick", "--num-gpus", "7", "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert distributed.select_gpus(num_gpus=1) == [7]
        with pytest.raises(DevicesBusy, match="GPU 0: claimed by "):
            distributed.select_gpus(gpu_ids=[0])
        other.communicate()


def test_set_visible_gpus_exports_uuids(machine: Machine, snapshot: SnapshotAssertion) -> None:
    machine(scenarios.eight_a100_idle())
    distributed.set_visible_gpus([0, 2])
    assert visible_now() == f"{gpu_uuid(0)},{gpu_uuid(2)}"
    assert distributed.get_available_gpus() == [0, 2]
    with pytest.raises(NoSuchDevice, match="GPU 1 ") as refused:
        distributed.set_visible_gpus([1])
    assert refused.value.what == snapshot


def test_set_visible_gpus_to_none_means_cpu(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    distributed.set_visible_gpus([])
    assert visible_now() == ""
    assert distributed.get_available_gpus() == []


TOO_LATE = [
    "cannot select GPUs 0, 2: CUDA is already initialized in this process",
    "CUDA reads CUDA_VISIBLE_DEVICES once, at initialization; a later change has no effect",
    "select GPUs before anything uses CUDA (.cuda(), .to('cuda'), torch.cuda.…, including "
    "torch.cuda.is_available()), or start the program with: "
    "muster gpus pick --gpu-ids … python …",
]


def test_set_visible_gpus_refuses_when_torch_has_initialized_cuda(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C1
    machine(scenarios.eight_a100_idle())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(CudaAlreadyInitialized) as caught:
        distributed.set_visible_gpus([0, 2])
    assert str(caught.value).splitlines() == TOO_LATE
    assert visible_now() is None


@pytest.mark.parametrize(("answer", "too_late"), [(3, False), (0, True), (100, True)])
def test_set_visible_gpus_asks_the_driver_itself(
    machine: Machine, own_machine: Path, answer: int, too_late: bool
) -> None:
    # torch.cuda.is_available() starts the driver, and torch does not call that initialized.
    machine(scenarios.eight_a100_idle())
    source = own_machine / "cuda.c"
    source.write_text(f"int cuDeviceGetCount(int *count) {{ *count = 8; return {answer}; }}\n")
    library = own_machine / "libcuda.so.1"
    build = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*build, str(source)], check=True)
    program = (
        "import ctypes, os, sys; from torchmuster.distributed import set_visible_gpus\n"
        "ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
        "try: set_visible_gpus([0, 2]); print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(library)], capture_output=True, text=True, check=True
    )
    expected = TOO_LATE if too_late else [f"{gpu_uuid(0)},{gpu_uuid(2)}"]
    assert done.stdout.splitlines() == expected


def test_setup_chooses_hides_and_returns_the_device(
    machine: Machine, torch_with_gpus: None
) -> None:
    machine(scenarios.eight_a100_idle())
    assert distributed.setup_gpu_environment(gpu_ids=[2, 3, 5, 7]) == torch.device("cuda:0")
    assert distributed.get_available_gpus() == [2, 3, 5, 7]


def test_setup_without_gpus_is_the_cpu_with_its_reason(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    machine(scenarios.no_gpus())
    assert distributed.setup_gpu_environment() == torch.device("cpu")
    machine(scenarios.driver_mismatch())
    assert distributed.setup_gpu_environment(num_gpus=1) == torch.device("cpu")
    with pytest.raises(NoSuchDevice):
        distributed.setup_gpu_environment(gpu_ids=[0])
    machine(scenarios.eight_a100_idle())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert distributed.setup_gpu_environment(num_gpus=2) == torch.device("cpu")
    assert 'CUDA_VISIBLE_DEVICES=""' in caplog.messages[-1]
    assert caplog.messages == snapshot


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_torch_that_cannot_use_the_gpus_is_told_about(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda: str | None,
    snapshot: SnapshotAssertion,
) -> None:
    # S2.8 "GPUs not being used": a CPU build, and a CUDA build without a driver that fits.
    machine(scenarios.eight_a100_idle())
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert distributed.setup_gpu_environment(num_gpus=1) == torch.device("cpu")
    (message,) = [one for one in caplog.messages if f"torch {torch.__version__} " in one]
    assert message.replace(torch.__version__, "VERSION") == snapshot


def test_optimal_device_is_the_least_loaded_as_torch_numbers_it(
    machine: Machine, torch_with_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(scenarios.eight_a100())
    assert distributed.get_optimal_device() == torch.device("cuda:6")
    assert distributed.get_optimal_device(gpu_ids=[0, 5]) == torch.device("cuda:5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,0")
    assert distributed.get_optimal_device() == torch.device("cuda:0")
    assert distributed.get_optimal_device(gpu_ids=[0]) == torch.device("cuda:1")


def test_optimal_device_among_unlike_cards_is_found_by_uuid(
    machine: Machine, torch_with_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CUDA numbers the fastest first: here the 4090, nvidia-smi's GPU 3, is torch's cuda:0
    machine(scenarios.mixed_consumer())
    fastest_first = [3, 1, 2, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda number: SimpleNamespace(uuid=gpu_uuid(fastest_first[number]).removeprefix("GPU-")),
    )
    assert distributed.get_optimal_device(gpu_ids=[3]) == torch.device("cuda:0")
    assert distributed.get_optimal_device(gpu_ids=[0]) == torch.device("cuda:3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert distributed.get_optimal_device(gpu_ids=[3]) == torch.device("cuda:3")


def test_print_gpu_info_prints_the_documented_line(
    machine: Machine, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    scenario = scenarios.eight_a100_idle()
    scenario["devices"] = scenario["devices"][:2]
    scenario["devices"][0] |= {
        "name": "NVIDIA A100-SXM4-40GB",
        "memory": {"total": 40536 * 2**20, "used": 1234 * 2**20, "reserved": 0},
    }
    machine(scenario)
    distributed.print_gpu_info()
    assert capsys.readouterr().out == snapshot
    distributed.print_gpu_info([1])
    assert capsys.readouterr().out.count("\n") == 1


def test_memory_usage_is_used_total_percent(machine: Machine) -> None:
    machine(scenarios.eight_a100())
    used, total, percent = distributed.get_gpu_memory_usage(5)
    assert (used, total) == (12292, 81920)
    assert percent == pytest.approx(100 * 12292 / 81920, abs=0.01)


def test_memory_that_cannot_be_read_is_not_zero(
    machine: Machine, snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.one_failing())
    with pytest.raises(MusterError, match="GPU 2 ") as refused:
        distributed.get_gpu_memory_usage(2)
    assert refused.value == snapshot


@pytest.mark.parametrize(
    ("size_gb", "count", "expected", "words"),
    [
        (14, None, [0], "strategy single"),
        (14, 4, [0, 1, 2, 3], "strategy ddp"),
        (140, None, list(range(8)), "strategy fsdp"),
        (30, 2, [0, 1], "strategy fsdp"),
    ],
)
def test_gpus_for_a_model(
    machine: Machine, size_gb: float, count: int | None, expected: list[int], words: str
) -> None:
    machine(scenarios.eight_a100_idle())
    chosen = distributed.auto_select_gpus_for_model(model_size_gb=size_gb, num_gpus=count)
    assert chosen == expected
    assert words in chosen.reason
    assert words == f"strategy {chosen.strategy}"


def test_a_model_that_fits_nowhere_is_refused_with_its_need(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    with pytest.raises(
        TooFewDevices, match="8 GPUs with at least 207 GiB free requested, none available"
    ):
        distributed.auto_select_gpus_for_model(model_size_gb=400)


def test_device_info_speaks_of_what_torch_can_use(
    machine: Machine, torch_with_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(scenarios.eight_a100_idle())
    info = distributed.get_device_info()
    assert (info["num_gpus"], info["cuda_available"]) == (8, True)
    assert info["devices"][0]["name"] == "NVIDIA A100-SXM4-80GB"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.get_device_info() == {"num_gpus": 0, "devices": [], "cuda_available": False}


@pytest.mark.slow
def test_everything_works_without_any_gpu_or_driver(
    own_machine: Path, snapshot: SnapshotAssertion
) -> None:
    program = (
        "import json; from torchmuster.distributed import *\n"
        "print_gpu_info()\n"
        "print(json.dumps([get_available_gpus(), get_gpu_info(), get_device_info(),\n"
        "  str(setup_gpu_environment()), str(get_optimal_device())]))\n"
        "for call in (lambda: select_gpus(num_gpus=1), lambda: auto_select_gpus_for_model(1),\n"
        "             lambda: get_gpu_memory_usage(0)):\n"
        "    try: call()\n"
        "    except Exception as error: print(type(error).__name__, '|', error.fix)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=own_machine,
        capture_output=True,
        text=True,
    )
    first, answers, *refusals = done.stdout.splitlines()
    assert first == "Available GPUs: 0"
    nothing = {"num_gpus": 0, "devices": [], "cuda_available": False}
    assert json.loads(answers) == [[], [], nothing, "cpu", "cpu"]
    names, fixes = zip(*(one.split(" | ") for one in refusals), strict=True)
    assert names == ("TooFewDevices", "TooFewDevices", "NoSuchDevice")
    (fix,) = set(fixes)
    assert fix == snapshot
