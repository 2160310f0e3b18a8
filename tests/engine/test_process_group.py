"""Forming, testing and ending a group from Python, in one process.

There is no GPU where the tests run; what torch would do with one is decided by functions over
``Surroundings``, which are tested as such.
"""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from syrupy.assertion import SnapshotAssertion
from torch.distributed import HashStore  # type: ignore[attr-defined]

from free_port import free_port
from patience import GIVE_UP_S
from torchmuster import distributed
from torchmuster.diagnose.probes import communication, exact_values
from torchmuster.diagnose.probes.in_time import Hangs
from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.probes import membership, process_group
from torchmuster.launch.probes.membership import BackendChoice, BackendFacts
from torchmuster.launch.probes.process_group import BackendOffer

pytestmark = pytest.mark.engine

VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*VARIABLES, "GLOO_SOCKET_IFNAME"]:
        monkeypatch.delenv(name, raising=False)
    yield
    distributed.cleanup_distributed()


def set_all(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


# ---- a group of one


def test_one_process_without_a_launcher_is_a_group_of_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # as in a CPU build
    device = distributed.setup_distributed(0, 1)
    assert device == torch.device("cpu")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert distributed.verify_gpu_communication(0, 1)
    info = distributed.get_group_info()
    reasons = info.pop("reasons")
    assert reasons[-1] in caplog.messages
    assert [one.replace(torch.__version__, "VERSION") for one in reasons] == snapshot
    assert info == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "backend": "gloo",
        "device": torch.device("cpu"),
        "simulated": True,
    }


def test_a_group_of_one_listens_to_nobody_outside() -> None:
    distributed.setup_distributed(0, 1, "gloo")
    heard = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert set(heard) <= {"127.0.0.1"}
    # Here the machine's own name may lead to loopback anyway; elsewhere it leads to the network.
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_cleanup_twice_in_finally_and_without_a_group() -> None:
    def train() -> None:
        try:
            distributed.setup_distributed(0, 1, "gloo")
            raise ZeroDivisionError
        finally:
            distributed.cleanup_distributed()
            distributed.cleanup_distributed()

    before = dict(os.environ)
    distributed.cleanup_distributed()
    with pytest.raises(ZeroDivisionError):
        train()
    assert not dist.is_initialized()
    assert distributed.get_group_info() == {}
    assert dict(os.environ) == before


def test_an_error_while_ending_does_not_hide_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    distributed.setup_distributed(0, 1, "gloo")

    def broken() -> None:
        raise RuntimeError("connection closed by peer\nand much more")

    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", broken)
        distributed.cleanup_distributed()
    expected = (
        "the process group did not shut down cleanly: RuntimeError: connection closed by peer"
    )
    assert expected in caplog.messages
    distributed.cleanup_distributed()
    assert not dist.is_initialized()


def test_the_interface_a_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.setup_distributed(0, 1, "gloo")
    distributed.cleanup_distributed()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


# ---- arguments and environment


def test_the_environment_of_a_launcher_is_honoured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_all(monkeypatch, RANK=0, WORLD_SIZE=1, LOCAL_RANK=3, MASTER_ADDR="127.0.0.1")
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    distributed.setup_distributed(0, 1, "gloo")
    info = distributed.get_group_info()
    assert (info["local_rank"], info["simulated"]) == (3, False)
    heard = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert ("127.0.0.1", port) in [(one.ip, one.port) for one in heard]


@pytest.mark.parametrize(
    ("variable", "argument", "arguments"),
    [("RANK", "rank=1", (1, 4)), ("WORLD_SIZE", "world_size=4", (1, 4))],
)
def test_arguments_that_contradict_the_environment_are_refused_with_both_values(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    argument: str,
    arguments: tuple[int, int],
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(Impossible) as caught:
        distributed.setup_distributed(*arguments, "gloo", timeout_s=1)
    assert argument in caught.value.what
    assert f"{variable}=2" in caught.value.what
    assert f"int(os.environ['{variable}'])" in caught.value.fix
    assert caught.value == snapshot
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("LOCAL_RANK", "first", "from 0"),
        ("LOCAL_RANK", "-1", "from 0"),
        ("LOCAL_WORLD_SIZE", "0", "from 1"),
        ("MASTER_PORT", "none", "from 1"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, limits: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(Impossible) as caught:
        distributed.setup_distributed(0, 1)
    assert caught.value.what == f"{name}={value} is not valid"
    assert caught.value.why.startswith(f"{name} is an integer {limits};")
    assert caught.value.fix == f"unset {name}"


def test_local_rank_is_torchruns_or_zero(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    assert distributed.get_local_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert distributed.get_local_rank() == 5
    monkeypatch.setenv("LOCAL_RANK", "five")
    with pytest.raises(Impossible, match="LOCAL_RANK=five") as refused:
        distributed.get_local_rank()
    assert refused.value == snapshot


def test_ranks_without_a_launcher_meet_here_at_the_usual_port(snapshot: SnapshotAssertion) -> None:
    member = membership.read_membership(1, 2, {})
    assert (member.address, member.port) == ("127.0.0.1", 29500)
    assert (member.local_rank, member.local_world_size) == (1, 2)
    assert [one.split()[0] for one in member.reasons] == ["MASTER_ADDR", "MASTER_PORT"]
    assert member.reasons == snapshot


@pytest.mark.parametrize(
    ("address", "local_rank"), [("localhost", 5), ("::1", 5), ("10.0.0.1", None), ("node-1", None)]
)
def test_the_place_on_a_machine_is_not_guessed_where_there_may_be_several(
    address: str, local_rank: int | None
) -> None:
    member = membership.read_membership(5, 8, {"MASTER_ADDR": address, "MASTER_PORT": "1234"})
    assert member.local_rank == local_rank
    assert member.reasons == ()


# ---- a group that is there already, or cannot be


def test_a_group_that_somebody_else_made_is_used(snapshot: SnapshotAssertion) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert distributed.setup_distributed(0, 1) == torch.device("cpu")
    assert distributed.get_group_info()["reasons"] == snapshot
    assert distributed.verify_gpu_communication(0, 1)


def test_a_port_in_use_is_refused_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(NotNow, match=rf"127\.0\.0\.1:{port}") as caught:
            distributed.setup_distributed(0, 2, "gloo")
    assert caught.value.why == snapshot
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(MusterError, match="2 of 3 ranks did not join: 1, 2") as caught:
        distributed.setup_distributed(
            0, 3, "gloo", timeout_s=5
        )  # its own store must be there by then
    assert caught.value.why == "rank 0 waited 5 s for them"


def test_a_first_rank_that_is_not_there_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    expected = f"rank 1 could not form a group of 2 at 127.0.0.1:{port} \\(limit 0.5 s\\)"
    with pytest.raises(MusterError, match=expected):
        distributed.setup_distributed(1, 2, "gloo", timeout_s=0.5)


# ---- which library, which device


def at(
    accelerator: str | None = "cuda",
    count: int = 8,
    libraries: frozenset[str] = frozenset({"nccl"}),
    system: str = "linux",
) -> BackendFacts:
    return BackendFacts(
        system=system,
        torch_version="2.13.0",
        accelerator=accelerator,
        device_count=count,
        libraries=libraries,
    )


def chosen(here: BackendFacts, rank: int = 0, world_size: int = 1, **environment: str) -> Any:
    return membership.choose_backend(
        "nccl", membership.read_membership(rank, world_size, environment), here
    )


def test_each_rank_gets_the_gpu_of_its_local_rank() -> None:
    remote = {"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    assert chosen(at(), 11, 16, **remote).value == BackendChoice(
        backend="nccl", device="cuda", index=3
    )
    assert chosen(at(), 2, 4).value == BackendChoice(backend="nccl", device="cuda", index=2)


@pytest.mark.parametrize(
    ("here", "device", "reason"),
    [
        (at(None, 0), "cpu", "on the CPU: torch sees no GPU on this host"),
        (at(None, 0, frozenset()), "cpu", "on the CPU: torch 2.13.0 is built without NCCL"),
        (at(count=3), "cpu", "on the CPU: this host has 4 ranks, but torch sees 3 GPUs"),
        (at("mps", 1), "cpu", "on the CPU: there is no communication library for Apple GPUs"),
        (at(system="win32"), "cuda", "on the GPU: NCCL does not exist for Windows"),
        (at("xpu"), "cpu", "on the CPU: torch 2.13.0 is built without XCCL"),
    ],
)
def test_where_nccl_is_impossible_it_is_gloo_with_the_reason(
    here: BackendFacts, device: str, reason: str
) -> None:
    decision = chosen(here, 1, 4)
    assert (decision.value.backend, decision.value.device) == ("gloo", device)
    assert decision.reason == f"gloo instead of nccl, {reason}"


def test_a_local_rank_without_a_gpu() -> None:
    decision = chosen(at(count=2), 5, 8, MASTER_ADDR="10.0.0.1", LOCAL_RANK="5")
    assert decision.value == BackendChoice(backend="gloo", device="cpu")
    assert "LOCAL_RANK is 5" in decision.reason
    assert "2 GPUs" in decision.reason


def test_the_device_is_set_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    done: list[object] = []
    monkeypatch.setattr(process_group, "backend_facts", at)
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **more: done.append((name, more["device_id"]))
    )
    assert distributed.setup_distributed(0, 1) == torch.device("cuda:2")
    assert done == [2, ("nccl", torch.device("cuda:2"))]


# ---- what the ranks agree on


def offer(rank: int, name: str = "nccl") -> BackendOffer:
    return BackendOffer(backend=name, why=f"rank {rank} on node-{rank}: why {name}")


def test_one_rank_that_cannot_use_nccl_decides_for_all() -> None:
    for offers in ([offer(0), offer(1), offer(2, "gloo")], [offer(0), offer(2, "gloo")]):
        assert process_group.compare_offers(offers) == offer(2, "gloo")


def test_the_verdict_reaches_all_and_an_earlier_attempts_keys_do_no_harm() -> None:
    store, limit = HashStore(), timedelta(seconds=GIVE_UP_S)
    members = [membership.read_membership(rank, 3, {}) for rank in range(3)]
    offers = [offer(0), offer(1), offer(2, "gloo")]

    def agree(rank: int) -> BackendOffer:
        return process_group.agree_on_backend(store, members[rank], offers[rank], limit)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            assert list(pool.map(agree, range(3))) == [process_group.compare_offers(offers)] * 3


# ---- communication


def test_on_gpus_the_watchdog_keeps_the_groups_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values: calls.append(values.device.type))
    monkeypatch.setattr(communication, "wait_for_device", calls.append)
    device = torch.device("meta")
    assert communication._sum_over_ranks(0, device, GIVE_UP_S).device == device
    assert calls == ["meta", device]  # no timeout was given to the operation


def test_on_gpus_a_missing_rank_is_found_by_our_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    comes = threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda values: comes.wait(GIVE_UP_S))
    monkeypatch.setattr(communication, "wait_for_device", lambda device: None)
    with pytest.raises(Hangs):
        communication._sum_over_ranks(0, torch.device("meta"), -0.9)
    comes.set()


def test_a_wrong_sum_is_told_with_both_values(
    caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    distributed.setup_distributed(0, 1, "gloo")
    caplog.clear()
    assert distributed.verify_gpu_communication(0, 3) is False
    assert "is 1, expected 6 " in caplog.text
    assert caplog.messages == snapshot


def test_a_single_wrong_value_is_enough(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    distributed.setup_distributed(0, 1, "gloo")
    caplog.clear()
    sums = exact_values.exact_sums(1, 262144, 0, torch.device("cpu"))
    sums[77] = 0
    monkeypatch.setattr(communication, "_sum_over_ranks", lambda *_: sums)
    assert distributed.verify_gpu_communication(0, 1) is False
    assert "is 0, expected 540 (1 of" in caplog.text


def test_an_error_is_a_false_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    distributed.setup_distributed(0, 1, "gloo")
    caplog.clear()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: illegal access\nCUDA kernel errors might be…")

    with monkeypatch.context() as patch:
        patch.setattr(communication, "exact_numbers", broken)
        assert distributed.verify_gpu_communication(0, 1) is False
    (message,) = caplog.messages
    assert message.endswith(": RuntimeError: CUDA error: illegal access")
    assert message == snapshot
