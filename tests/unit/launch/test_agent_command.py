"""What exactly a machine starts: torchrun's agent with every setting explicit, and its environment."""

import json
import sys
from pathlib import Path

import pytest

from torchmuster.launch import protocol
from torchmuster.launch.node import engines
from torchmuster.launch.node.engines import NodeShare
from torchmuster.launch.rank import start


def share(
    *,
    backend: str = "muster",
    place: int = 0,
    socket: int | None = None,
    endpoint: str = "10.0.0.1:29400",
    environment: dict[str, str] | None = None,
    module: bool = False,
) -> NodeShare:
    prepare = protocol.Prepare(
        run_id="20260131-train",
        token="0123.0",
        command=("my train.py", "--lr", "1e-4", "$HOME", ""),
        module=module,
        folder="/home/ana",
        device="gpu",
        ranks=None,
        environment=environment or {},
    )
    start = protocol.Start(
        attempt=2,
        node_rank=place,
        nodes=3,
        first_rank=8 * place,
        world_size=20,
        backend=backend,
        endpoint=endpoint,
        address="10.0.0.1",
        port=29400,
        local_address=f"10.0.0.{place + 1}",
        interface="eth0",
        timeout_s=120.0,
        max_restarts=3,
    )
    folder = Path("/tmp/records")
    logs = Path("/home/ana/runs/x/logs")
    return NodeShare(
        prepare=prepare, start=start, ranks=8, logs=logs, records=folder, socket=socket
    )


def flags(one: NodeShare) -> list[str]:
    command = engines.agent_command(one)
    return command[4 : command.index("--no-python") + 1]


def common(place: int) -> list[str]:
    return [
        f"--local-addr=10.0.0.{place + 1}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--log-dir=/tmp/records/torchrun",
        "--no-python",
    ]


def test_the_whole_command() -> None:
    settings = {
        "logs": "/home/ana/runs/x/logs",
        "records": "/tmp/records",
        "world_size": 20,
        "attempt": 2,
        "max_restarts": 3,
        "first_step": 0,
        "module": False,
    }
    assert engines.agent_command(share(socket=7)) == [
        sys.executable,
        "-m",
        "torchmuster.launch.node.elastic_agent",
        "/tmp/records/agent.json",
        "--nnodes=3",
        "--nproc-per-node=8",
        "--rdzv-id=20260131-train.2",
        "--rdzv-backend=torchmuster",
        "--rdzv-endpoint=10.0.0.1:29400",
        "--rdzv-conf=rank=0,timeout=120,socket=7",
        *common(0),
        sys.executable,
        "-u",
        start.__file__,
        json.dumps(settings),
        "my train.py",
        "--lr",
        "1e-4",
        "$$HOME",  # torchrun makes one of two
        "",
    ]


def test_only_the_first_machine_has_the_store_s_socket() -> None:
    assert "--rdzv-conf=rank=2,timeout=120" in flags(share(place=2))


@pytest.mark.parametrize(("place", "is_host"), [(0, "true"), (2, "false")])
def test_with_c10d_who_hosts_is_told_and_clocks_do_not_matter(place: int, is_host: str) -> None:
    words = flags(share(backend="c10d", place=place))
    assert "--rdzv-endpoint=10.0.0.1:29400" in words
    (backend,) = [word for word in words if word.startswith("--rdzv-backend=")]
    assert backend.endswith("c10d")
    conf = dict(
        item.split("=") for word in words if "rdzv-conf" in word for item in word[12:].split(",")
    )
    assert conf["is_host"] == is_host
    assert conf["join_timeout"] == "120"
    # A machine counts as gone only after an hour of silence by a clock that may be wrong.
    assert int(conf["keep_alive_interval"]) * int(conf["keep_alive_max_attempt"]) >= 3600
    assert words[-5:] == common(place)


def test_with_etcd_the_endpoint_is_the_user_s_server() -> None:
    words = flags(share(backend="etcd-v2", endpoint="etcd.local:2379"))
    assert "--rdzv-endpoint=etcd.local:2379" in words
    (backend,) = [word for word in words if word.startswith("--rdzv-backend=")]
    assert backend.endswith("etcd-v2")
    assert not any("is_host" in word for word in words)


def test_every_attempt_meets_under_a_name_of_its_own() -> None:
    (name,) = [word for word in flags(share()) if word.startswith("--rdzv-id=")]
    assert name == "--rdzv-id=20260131-train.2"


def test_a_module_is_told_to_the_rank() -> None:
    command = engines.rank_command(share(module=True))
    assert json.loads(command[3])["module"] is True


def test_the_environment_keeps_what_the_user_set() -> None:
    base = {
        "OMP_NUM_THREADS": "7",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "WARN",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PATH": "/bin",
        "HOME": "/home/ana",
    }
    merged = engines.agent_environment(share(), base, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, 4)
    for name in ("OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "PATH", "HOME"):
        assert merged[name] == base[name]
    assert merged["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert merged["TORCHMUSTER_RUN_TOKEN"] == "0123.0"
    assert base["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_threads_are_given_where_the_user_gave_none() -> None:
    assert engines.agent_environment(share(), {}, {}, 4)["OMP_NUM_THREADS"] == "4"
    given = share(environment={"OMP_NUM_THREADS": "2"})
    assert engines.agent_environment(given, {}, {}, 4)["OMP_NUM_THREADS"] == "2"


def test_what_the_run_was_given_wins_over_what_the_machine_has() -> None:
    given = share(environment={"NCCL_DEBUG": "INFO", "DATA": "/scratch"})
    merged = engines.agent_environment(given, {"NCCL_DEBUG": "WARN", "DATA": "/data"}, {}, 1)
    assert (merged["NCCL_DEBUG"], merged["DATA"]) == ("INFO", "/scratch")


def test_torchrun_s_own_settings_in_the_environment_do_not_change_the_command() -> None:
    merged = engines.agent_environment(share(), {"PET_NNODES": "7", "PET_RDZV_ID": "x"}, {}, 1)
    assert not [name for name in merged if name.startswith("PET_")]


def test_a_variable_can_be_taken_away() -> None:
    base = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert "CUDA_DEVICE_ORDER" not in engines.agent_environment(
        share(), base, {"CUDA_DEVICE_ORDER": None}, 1
    )


def test_without_torchrun_a_rank_is_told_the_same() -> None:
    told = engines.direct_environment(share(place=2), local_rank=3)
    assert told | {"USE_LIBUV": "0"} == told
    expected = {
        "RANK": "19",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "20",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
    }
    assert expected.items() <= told.items()
