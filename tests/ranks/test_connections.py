"""No command opens a connection that it was not asked for: every process of each command records where it connects."""

import socket
from pathlib import Path

import psutil
import pytest

from muster_command import Muster
from patience import GIVE_UP_S

pytestmark = pytest.mark.ranks

# Loaded by every Python process of a command, as site loads it. gloo and the store connect in C++, on loopback addresses
# that `muster run` gives them.
RECORDER = """\
import os, sys

def record(event, args):
    hosts = {"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0}
    if event in hosts:
        to = args[hosts[event]]
        with open(os.environ["CONNECTIONS"], "a") as file:
            print(to[0] if isinstance(to, tuple) else to, file=file)

sys.addaudithook(record)
"""
PLANTED = "192.0.2.1"  # of a range for documents; a datagram socket that is connected sends nothing
SCRIPT = f"""\
import socket
import torch.distributed as dist

socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("{PLANTED}", 9))

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
SETTINGS = """\
model: {build: "own:model"}
data: {dataset: "own:data"}
train: {steps: 2, global_batch_size: 4, micro_batch_size: 2}
"""
OWN = """\
import torch

def model():
    return torch.nn.Linear(4, 3)

def data():
    return torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
"""
COMMANDS = [
    "doctor",
    "gpus",
    "config new sft",
    "lab list",
    "run --device cpu --ranks 2 script.py",
    "train --config own.yaml --device cpu --ranks 1",
    "explain last",
    "runs",
    "watch --once",
    "logs last",
]


def test_no_command_connects_to_another_host(
    own_machine: Path, muster: Muster, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = own_machine / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RECORDER)
    connections = own_machine / "connections.txt"
    monkeypatch.setenv("CONNECTIONS", str(connections))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{own_machine}")
    for name, text in (("script.py", SCRIPT), ("own.py", OWN), ("own.yaml", SETTINGS)):
        (own_machine / name).write_text(text)
    for command in COMMANDS:
        result = muster(*command.split(), timeout_s=3 * GIVE_UP_S)
        assert result.code == 0, (command, result)
    opened = connections.read_text().split()
    assert opened.count(PLANTED) == 2  # by each rank of the script: what connects is recorded
    here = {"localhost", socket.gethostname()}
    for addresses in psutil.net_if_addrs().values():
        here.update(address.address for address in addresses)
    assert set(opened) <= {PLANTED, *here}
