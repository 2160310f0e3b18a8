"""The cause wins over what follows from it, details are taken from the text, and nothing is made up."""

import pytest

from torchmuster.known_errors.explain import Explanation, explain_text
from torchmuster.known_errors.rule import Role
from unit.known_errors.scoring import UNKNOWN, cause_of

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
CLOSED = (
    "RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:914"
)
WRAPPER = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-01-31_12:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"""
NO_STORE = (
    "[E socket.cpp:1023] [c10d] The client socket has timed out after 60000ms while trying to "
    "connect to ({}, {})."
)
NO_MESH = (
    "RuntimeError: Gloo connectFullMesh failed with [/w/gloo/transport/tcp/pair.cc:152] {}, "
    "remote=[{}]:4711"
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, {}, NCCL version "
    "2.14.3\n{}\nLast error:\n{}"
)


def first(text: str) -> Explanation:
    explanations = explain_text(text)
    assert explanations, text
    return explanations[0]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (NO_STORE.format("10.77.0.11", 29400), "rendezvous-timeout"),
        (
            f"{NO_STORE.format('192.168.3.4', 41234)}\nRendezvousConnectionError: The connection to the "
            "C10d store has failed. See inner exception for details.",
            "rendezvous-timeout",
        ),
        (NO_STORE.format("node1", 45423), "store-connect-timeout"),
        (NO_STORE.format("127.0.1.1", 29500), "hostname-is-loopback"),
        (
            "DistStoreError: wait timeout after 60000ms, keys: /default_pg/0//cpu//0/1",
            "store-wait-timeout",
        ),
        (
            NO_MESH.format("timed out connecting: SO_ERROR: Connection timed out", "10.7.0.2"),
            "gloo-connect-failed",
        ),
        (NO_MESH.format("Connection refused", "172.17.0.1"), "gloo-connect-failed"),
        (NO_MESH.format("Connection refused", "127.0.1.1"), "hostname-is-loopback"),
        (
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "hostname-unresolvable",
        ),
        (
            "[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: ens5",
            "gloo-no-interface",
        ),
        ("a:1:2 [0] NCCL WARN Bootstrap : no socket interface found", "nccl-no-interface"),
        (
            "[unbound_buffer.cc:78] Timed out waiting 40000ms for recv operation to complete",
            "collective-timeout",
        ),
        (f"{CLOSED}. This is typically caused by a remote worker crashing", "peer-died"),
        (
            "[c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer",
            "connection-reset",
        ),
        (
            "use_libuv was requested but PyTorch was build without libuv support",
            "libuv-missing",
        ),
        (
            "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
            "nccl-without-gpu",
        ),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "nccl-not-built"),
        (
            "The server socket has failed to listen on any local network address. port: 29500, "
            "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "port-in-use",
        ),
        ("ann@b: Permission denied (publickey).", "ssh-permission-denied"),
        ("Host key verification failed.", "ssh-host-key"),
        ("ssh: connect to host b port 22: Connection refused", "ssh-refused"),
        ("ssh: connect to host b port 22: Connection timed out", "ssh-timeout"),
        ("ssh: connect to host b port 22: No route to host", "ssh-timeout"),
        ("Error: The client socket has failed to connect", "store-connect-timeout"),
        ("Error: failed to connect to AMARDEEPS-IMAC", "hostname-unresolvable"),
        ("Error: Port 12355 not available", "port-in-use"),
        ("Warning: CUDA not available! Running on CPU", "no-gpu-visible"),
        (
            "Error: A module that was compiled using NumPy 1.x cannot be run in NumPy 2.1.2",
            "numpy-abi",
        ),
        ("RuntimeError: CUDA error: invalid device ordinal", "invalid-device-ordinal"),
        ("CUDA available: False\nGPU count: 0", "no-gpu-visible"),
    ],
)
def test_what_machines_that_do_not_find_each_other_say(text: str, cause: str) -> None:
    assert cause_of(text) == cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{CLOSED}\n{OOM}\n{WRAPPER}", "gpu-out-of-memory"),
        (
            f"{OOM}\nncclUnhandledCudaError: Call to CUDA function failed.\n{CLOSED}",
            "gpu-out-of-memory",
        ),
        (
            NCCL.format("unhandled cuda error", "ncclUnhandledCudaError", "Cuda failure 'x y z'"),
            "nccl-unhandled-cuda-error",
        ),
        (
            NCCL.format(
                "unhandled cuda error", "ncclUnhandledCudaError", "Cuda failure 'out of memory'"
            ),
            "gpu-out-of-memory",
        ),
        (
            NCCL.format(
                "internal error",
                "ncclInternalError: Internal check failed.",
                "Net : Call to recv from 10.0.0.2<50260> failed : Connection reset by peer",
            ),
            "connection-reset",
        ),
        (
            NCCL.format(
                "unhandled system error",
                "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
                "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)",
            ),
            "shared-memory-full",
        ),
        (
            NCCL.format(
                "unhandled system error", "ncclSystemError", "socketStartConnect: No route to host"
            ),
            "network-unreachable",
        ),
        (
            NCCL.format(
                "invalid usage", "ncclInvalidUsage", "Duplicate GPU detected : rank 1 and rank 0"
            ),
            "duplicate-gpu",
        ),
        (
            "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - "
            f"Connection refused).\n{NO_STORE.format('n1', 29500)}",
            "tcpstore-refused",
        ),
        (
            "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many "
            "open files (24)",
            "too-many-open-files",
        ),
        (
            "OSError: [Errno 28] No space left on device\nRuntimeError: DataLoader worker (pid 7) is killed "
            "by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
            "shared-memory-full",
        ),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\nslurmstepd: error: "
            "Detected 1 oom_kill event in StepId=7.0.",
            "slurm-oom",
        ),
        (
            "exitcode: -9 (pid: 5)\n[9.1] Out of memory: Killed process 5 (python) total-vm:9kB",
            "host-out-of-memory",
        ),
        (f"exitcode  : -9 (pid: 5)\n{CLOSED}", "killed-sigkill"),
        (
            "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version "
            "11040).\nRuntimeError: No CUDA GPUs are available",
            "driver-too-old",
        ),
        (
            "UserWarning: Failed to initialize NumPy: _ARRAY_API not found\nModuleNotFoundError: No "
            "module named 'einops'",
            "module-missing",
        ),
        (
            "slurmstepd: error: *** STEP 7.0 ON a CANCELLED AT 2026-01-31T12:00:00 DUE TO TIME LIMIT ***\n"
            f"{CLOSED}\nexitcode: -9",
            "slurm-time-limit",
        ),
        (
            "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should "
            "be the same",
            "mixed-device-tensors",
        ),
        (
            "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) "
            "should be the same",
            "dtype-mismatch",
        ),
        (
            "NVRM: Xid (PCI:0000:48:00): 79, pid=1, GPU has fallen off the bus.",
            "gpu-fell-off-bus",
        ),
        (
            "RuntimeError: CUDA driver error: operation not supported",
            "no-virtual-memory-management",
        ),
        (
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nMultiple Ranks "
            "are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this.",
            "duplicate-gpu",
        ),
    ],
)
def test_the_cause_wins_over_what_follows_from_it(text: str, cause: str) -> None:
    assert cause_of(text) == cause


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n\n",
        WRAPPER,
        f"KeyError: 'loss'\n{CLOSED}\n{WRAPPER}",
        f"AssertionError: rank 1 has no data\n{NO_STORE.format('n1', 29500)}",
        "Sending process 4711 closing signal SIGTERM",
        "Unable to shutdown process 5 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
        "NCCL INFO NET/IB : No device found.\nNCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/CUMEM",
        "step 100: loss 0.31, out of 2000; memory 12.3 GiB; no errors; timeout 1800 s",
        "RuntimeError: CUDA error",
        "the port of the application to GPUs was interrupted",
        "ValueError: too many values to unpack (expected 2)",
    ],
)
def test_what_is_not_known_is_not_explained(text: str) -> None:
    assert cause_of(text) == UNKNOWN


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("OSError: [Errno 98] Address already in use\nport: 29511,", ["'sport = :29511'"]),
        (NO_STORE.format("10.9.8.7", 29511), ["nc -vz 10.9.8.7 29511", "ufw allow 29511/tcp"]),
        ("Unable to find address for: ens5", ["is ens5 listed?"]),
        (
            "ModuleNotFoundError: No module named 'einops'",
            ["pip install einops  # on "],
        ),
        (
            "ModuleNotFoundError: No module named 'torch._six'",
            ["no submodule _six", "pip install --upgrade torch"],
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.pt'",
            ["ls -l /data/x.pt"],
        ),
        (
            "ssh: connect to host gpu-b port 2222: Connection refused",
            [
                "nc -vz gpu-b 2222",
                "sudo systemctl enable --now ssh || sudo systemctl enable --now sshd",
            ],
        ),
        ("ImportError: libcudnn.so.9: cannot open shared object file", ["grep libcudnn.so.9"]),
        ("KeyError: 'LOCAL_RANK'", ["LOCAL_RANK is not set"]),
        (
            "WeightsUnpickler error: Unsupported global: GLOBAL my.Kind was not an allowed global",
            ["add_safe_globals([my.Kind])"],
        ),
        ("CUDA error: operation not supported", ["CUDA reported: operation not supported"]),
    ],
)
def test_details_of_the_text_are_in_the_commands(text: str, parts: list[str]) -> None:
    one = first(text)
    said = "\n".join((one.what, one.why, one.confirm, one.fix))
    for part in parts:
        assert part in said


def test_what_the_text_does_not_tell_is_left_to_fill_in() -> None:
    assert "'sport = :PORT'" in first("OSError: Address already in use").confirm


def test_a_hostile_text_puts_no_commands_into_the_answer() -> None:
    for text in (
        "ModuleNotFoundError: No module named 'a;reboot'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/x;$(reboot)'",
        "ssh: connect to host b;reboot port 22: Connection refused",
        "PermissionError: [Errno 13] Permission denied: '/x`reboot`'",
    ):
        one = first(text)
        assert "reboot" not in one.confirm + one.fix.replace("sudo reboot", "")


def test_a_text_that_the_terminal_broke_in_the_middle_of_words() -> None:
    text = f"RuntimeError: {NO_STORE.format('10.9.8.7', 29511)}"
    broken = "\n".join(text[n : n + 40] for n in range(0, len(text), 40))
    assert first(broken).name == "store-connect-timeout"
    assert "10.9.8.7" in first(broken).fix


def test_others_follow_the_cause_each_once() -> None:
    explanations = explain_text(f"{CLOSED}\n{CLOSED}\n{OOM}\n{OOM}")
    assert [one.name for one in explanations] == ["gpu-out-of-memory", "peer-died"]
    assert [one.role for one in explanations] == [Role.CAUSE, Role.PEER_GONE]


def test_the_evidence_is_the_line_without_secrets_and_escapes() -> None:
    one = first(f"all is well\n\x1b[31m{OOM} token=hf_abcdefghijklmnopqrstuvwx\x07\x1b[0m\nlater")
    assert one.evidence.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert "hf_abc" not in one.evidence
    assert one.evidence.isprintable()
    assert "later" not in one.evidence


def test_an_error_in_the_middle_of_a_very_long_log_is_found() -> None:
    steps = "\n".join(f"step {n} took 0.31 s on gpu {n % 8}, loss 0.{n}" for n in range(20_000))
    assert first(f"{steps}\n{OOM}\n{steps}").name == "gpu-out-of-memory"


def test_the_machine_is_called_by_its_name() -> None:
    assert "on gpu-b" in explain_text("No module named 'einops'", host="gpu-b")[0].what


def test_the_line_of_the_users_own_code_is_in_the_excerpt() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/home/ana/train_hf.py", line 12, in <module>\n    rows.map(f)\n'
        '  File "/env/lib/python3.11/site-packages/datasets/fingerprint.py", line 3, in hash\n    dumps(x)\n'
        "_pickle.PicklingError: Can't pickle <function <lambda>>: it's not found\n"
    )
    explanation = first(text)
    assert explanation.name == "cannot-pickle"
    assert explanation.evidence.splitlines()[-1] == "raised at /home/ana/train_hf.py:12"
    assert "spawned process" not in explanation.what
