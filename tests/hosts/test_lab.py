"""The lab does what it says, and each fault can be felt by the programs on its hosts."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hosts import faults
from hosts.conftest import MakeEtcd, MakeLab
from hosts.host import Host, HostProcess
from hosts.lab import Lab, remove_abandoned
from hosts.namespaces import await_true
from hosts.sshd import PORT as SSH_PORT
from patience import GIVE_UP_S

PYTHON = [sys.executable, "-I", "-S", "-c"]

CONNECT = """
import errno, socket, sys, time
start = time.monotonic()
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print("connected", end=" ")
except TimeoutError:
    print("timed out", end=" ")
except OSError as error:
    print(errno.errorcode[error.errno], end=" ")
print(time.monotonic() - start)
"""

# Receives until the last of the datagrams, then says how many came; the sender's part is below.
COUNT = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
server.bind(("0.0.0.0", 5000))
print("ready", flush=True)
came = 0
while server.recv(100) != b"last":
    came += 1
print(came)
"""
SEND = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for burst in range(40):
    for _ in range(50):
        client.sendto(b"x", (sys.argv[1], 5000))
    time.sleep(0.002)
for _ in range(20):
    client.sendto(b"last", (sys.argv[1], 5000))
"""

# Sends so many bytes and awaits thanks for them, for so long.
PUSH = """
import socket, sys
client = socket.create_connection((sys.argv[1], 5001), timeout=float(sys.argv[3]))
client.sendall(b"x" * int(sys.argv[2]))
client.shutdown(socket.SHUT_WR)
print("answered", client.recv(10))
"""
SWALLOW = """
import socket
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
while True:
    client, _ = server.accept()
    while client.recv(65536):
        pass
    client.sendall(b"thanks")
    client.close()
"""


def connect(
    host: Host, address: str, port: int = SSH_PORT, timeout_s: float = 2.0
) -> tuple[str, float]:
    done = host.run([*PYTHON, CONNECT, address, str(port), str(timeout_s)], check=True)
    outcome, seconds = done.stdout.rsplit(maxsplit=1)
    return outcome, float(seconds)


def quickest(host: Host, address: str, *, below_s: float) -> float:
    """Return the least time that connecting took, of four tries and more until one was quick.

    Others use the machine, too, for as long as they like.
    """
    tries: list[float] = []

    def is_quick() -> bool:
        outcome, seconds = connect(host, address, timeout_s=GIVE_UP_S)
        assert outcome == "connected"
        tries.append(seconds)
        return len(tries) >= 4 and min(tries) < below_s

    await_true(f"{address} is reached within {below_s:g} s", is_quick)
    return min(tries)


def start_ready(host: Host, program: str) -> HostProcess:
    process = host.popen([*PYTHON, program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def interfaces(host: Host) -> dict[str, list[str]]:
    shown = json.loads(host.run(["ip", "-json", "-4", "addr"], check=True).stdout)
    return {one["ifname"]: [ip["local"] for ip in one["addr_info"]] for one in shown}


# ---- hosts


def test_hosts_have_names_addresses_and_processes_of_their_own(lab3: Lab) -> None:
    seen = "hostname; getent hosts $(hostname); cat /etc/machine-id /proc/sys/kernel/random/boot_id"
    identities = set()
    for number, host in enumerate(lab3.hosts, start=1):
        name, address, machine, boot = host.run(["sh", "-c", seen], check=True).stdout.splitlines()
        assert name == host.name == f"node{number}"
        assert address.split() == [host.address, name] == [f"10.77.0.1{number}", name]
        assert interfaces(host) == {"lo": ["127.0.0.1"], "eth0": [host.address]}
        identities |= {machine, boot}
        for other in lab3.hosts:
            assert connect(host, other.name)[0] == "connected"
    assert len(identities) == 6
    node1, node2, _ = lab3.hosts
    marked = node1.popen(["sleep", "100"], env={"MARK": "here"})
    # While a program takes the place of another, its environment cannot be seen.
    await_true("it runs", lambda: bool(node1.processes_with_environment("MARK")))
    assert node1.processes_with_environment("MARK", "here") == [marked.command_pid]
    assert node1.processes_with_environment("MARK") == [marked.command_pid]
    assert node1.processes_with_environment("MARK", "her") == []
    assert marked.command_pid in node1.pids()
    assert node2.processes_with_environment("MARK") == []
    assert "sleep 100" not in node2.run(["ps", "-ax"], check=True).stdout


def test_a_command_runs_as_it_would_without_a_lab(lab2: Lab, tmp_path: Path) -> None:
    node1, _ = lab2.hosts
    done = node1.run(
        ["sh", "-c", 'cat; pwd; echo "$A" >&2; exit 3'], input="in ", cwd=tmp_path, env={"A": "b"}
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"in {tmp_path}\n", "b\n", 3)
    assert node1.run(["no-such-program"]).returncode == 127
    with pytest.raises(subprocess.TimeoutExpired):
        node1.run(["sleep", "100"], timeout=0.2)
    with pytest.raises(subprocess.CalledProcessError):
        node1.run(["false"], check=True)
    program = "import time\ntry: print('ready', flush=True); time.sleep(100)\nexcept KeyboardInterrupt: raise SystemExit(7)"
    interrupted = start_ready(node1, program)
    interrupted.interrupt()
    assert interrupted.wait(GIVE_UP_S) == 7
    for number in (signal.SIGTERM, signal.SIGKILL):
        ended = start_ready(node1, program)
        ended.send_signal(number)
        assert ended.wait(GIVE_UP_S) == -number
        assert ended.command_pid not in node1.pids()


def test_ssh_runs_a_command_as_the_other_host(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    program = "'import os, socket; print(socket.gethostname(), os.environ[\"XDG_STATE_HOME\"])'"
    done = node1.run(["ssh", "node2", sys.executable, "-c", program])
    assert done.stdout.split() == ["node2", str(node2.folder / "state")], done.stderr
    assert node1.run(["ssh", node2.address, "hostname"]).stdout == "node2\n"
    assert node2.run(["ssh", "node1", "hostname"]).stdout == "node1\n"
    session = node1.popen(["ssh", "node2", "MARK=1 sleep 100"])
    await_true("it runs there", lambda: bool(node2.processes_with_environment("MARK", "1")))
    assert node1.processes_with_environment("MARK") == []
    session.terminate()


def test_labs_live_side_by_side_and_leave_nothing(make_lab: MakeLab) -> None:
    with Lab(2) as one, Lab(2, ssh=False) as other:
        assert one.ssh_config.exists()
        sleepers = "setsid sleep 100 & setsid sleep 100 & wait"
        one.hosts[1].popen(["sh", "-c", sleepers], env={"MARK": "1"})
        stubborn = other.hosts[0].popen(
            [*PYTHON, "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
        )
        assert connect(one.hosts[0], "node2")[0] == "connected"
        assert connect(other.hosts[0], "node2")[0] == "ECONNREFUSED"
        await_true("all run", lambda: len(one.hosts[1].processes_with_environment("MARK")) == 3)
        pids = [pid for lab in (one, other) for host in lab.hosts for pid in host.pids()]
        folders = [one.folder, other.folder]
    assert stubborn.returncode == -signal.SIGKILL
    assert len(pids) >= 6  # sshd may still have had a process for who connected
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    for lab in (one, other):
        assert list(Path("/run/netns").glob(f"{lab.prefix}*")) == []
        assert list(Path("/etc/netns").glob(f"{lab.prefix}*")) == []
    assert not any(folder.exists() for folder in folders)


def test_a_lab_whose_process_is_killed_is_removed_by_the_next(make_lab: MakeLab) -> None:
    program = (
        "import signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from hosts.lab import Lab\n"
        "lab = Lab(2).__enter__()\n"
        "print(lab.folder, *lab.hosts[0].pids(), flush=True); signal.pause()"
    )
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", program, tests], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder, *pids = owner.stdout.readline().split()
        assert pids
        remove_abandoned()
        prefix = f"muster{owner.pid}-"
        assert list(Path("/run/netns").glob(f"{prefix}*")) != []
        owner.kill()
    await_true("its hosts are down", lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))
    remove_abandoned()
    assert list(Path("/run/netns").glob(f"{prefix}*")) == []
    assert list(Path("/etc/netns").glob(f"{prefix}*")) == []
    assert not Path(folder).exists()


def test_etcd_serves_on_a_host(lab2: Lab, make_etcd: MakeEtcd) -> None:
    node1, node2 = lab2.hosts
    etcd = make_etcd(node1, 12379)
    assert etcd.endpoint == "10.77.0.11:12379"
    program = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read())"
    answer = node2.run([*PYTHON, program, f"{etcd.url}/v2/keys/"])
    assert '"action":"get"' in answer.stdout, answer.stderr


# ---- faults


def test_names_lead_astray(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    resolve = ["getent", "ahostsv4", "node1"]
    with faults.injected(lab2, faults.own_name_is_loopback("node1")):
        assert node1.run(resolve).stdout.split()[0] == "127.0.1.1"
        assert node2.run(resolve).stdout.split()[0] == node1.address
    with faults.injected(lab2, faults.own_name_is_unknown("node1")):
        program = "import socket; socket.gethostbyname(socket.gethostname())"
        failed = node1.run([*PYTHON, program])
        assert "socket.gaierror: [Errno -3]" in failed.stderr
        assert node2.run(["ssh", "node1", "hostname"]).stdout == "node1\n"
    with faults.injected(lab2, faults.NameLeadsTo(host="node2", name="node1", address="10.9.9.9")):
        assert node2.run(resolve).stdout.split()[0] == "10.9.9.9"
    assert node1.run(resolve).stdout.split()[0] == node1.address
    assert node2.run(resolve).stdout.split()[0] == node1.address


def test_further_interfaces(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    usual = interfaces(node1)
    everything = (faults.DockerBridge(), faults.DeadInterface(), faults.SecondNetwork())
    with faults.injected(lab2, *everything):
        for host in lab2.hosts:
            found = interfaces(host)
            assert found["docker0"] == ["172.17.0.1"]
            assert found["eno1"] == [f"192.168.77.1{host.number}"]
            assert sorted(set(found) - {"docker0"})[0] == "eno1"
            assert found["eth1"] == [f"10.88.0.1{host.number}"]
            up = json.loads(host.run(["ip", "-json", "link"]).stdout)
            assert all("LOWER_UP" in link["flags"] for link in up)
        assert connect(node1, "10.88.0.12")[0] == "connected"
        assert connect(node1, "192.168.77.12")[0] in ("timed out", "EHOSTUNREACH")
        assert connect(node1, "10.77.0.12")[0] == "connected"
    assert interfaces(node1) == usual
    with faults.injected(lab2, faults.DeadInterface(host="node2")):
        assert "eno1" in interfaces(node2)
        assert "eno1" not in interfaces(node1)


def test_firewalls_say_no_in_three_ways(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    taken = [faults.PortTaken(host="node2", port=port) for port in (29400, 29500)]
    answers: list[tuple[faults.Verdict, str]] = [
        ("drop", "timed out"),
        ("refuse", "ECONNREFUSED"),
        ("prohibit", "EHOSTUNREACH"),
    ]
    with faults.injected(lab2, *taken):
        for verdict, answer in answers:
            closed = faults.ClosedPorts(host="node2", ports=(29400,), verdict=verdict)
            with faults.injected(lab2, closed):
                assert connect(node1, "node2", 29400)[0] == answer
                assert connect(node1, "node2", 29500)[0] == "connected"
                assert connect(node2, "node2", 29400)[0] == "connected"
        only = faults.OnlyOpenPorts(host="node2", ports=(SSH_PORT, 29400))
        with faults.injected(lab2, only):
            assert connect(node1, "node2", 29400)[0] == "connected"
            assert connect(node1, "node2", SSH_PORT)[0] == "connected"
            assert connect(node1, "node2", 29500)[0] == "timed out"
            assert connect(node2, "node1", SSH_PORT)[0] == "connected"
        assert connect(node1, "node2", 29500)[0] == "connected"


def test_a_port_is_taken(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    bind = [*PYTHON, "import socket; socket.create_server(('0.0.0.0', 29400))"]
    undo = faults.PortTaken(host="node1", port=29400).apply(lab2)
    assert "Address already in use" in node1.run(bind).stderr
    assert node2.run(bind).returncode == 0
    undo()
    assert not node1.listens_at(29400)
    assert node1.run(bind).returncode == 0


def test_packets_are_lost(lab2: Lab) -> None:
    node1, node2 = lab2.hosts

    def arrived() -> int:
        counter = start_ready(node2, COUNT)
        node1.run([*PYTHON, SEND, node2.address], check=True)
        return int(counter.communicate(timeout=GIVE_UP_S)[0])

    assert arrived() == 2000
    with faults.injected(lab2, faults.Loss(percent=5)):
        # 100 are lost on average, with a deviation of 10.
        assert 1840 < arrived() < 1960


def test_delay_is_felt_at_the_usual_address(lab3: Lab) -> None:
    node1, node2, node3 = lab3.hosts
    with faults.injected(lab3, faults.Delay(host="node2", round_trip_ms=100)):
        # Learns who has the address, which takes a trip of its own.
        connect(node1, "node2", timeout_s=GIVE_UP_S)
        assert quickest(node1, "node2", below_s=0.2) >= 0.1
        quickest(node1, node3.address, below_s=0.05)
        assert node1.run(["ssh", "node2", "hostname"]).stdout == "node2\n"
    quickest(node2, "node1", below_s=0.05)


def test_big_frames_vanish_where_the_switch_takes_small_ones_only(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    start_ready(node2, SWALLOW)

    def push(size: int, timeout_s: float = GIVE_UP_S) -> subprocess.CompletedProcess[str]:
        return node1.run([*PYTHON, PUSH, node2.address, str(size), str(timeout_s)])

    with faults.injected(lab2, faults.Mtu(host_bytes=9000, switch_bytes=1500)):
        assert "thanks" in push(1000).stdout
        assert "timed out" in push(100_000, timeout_s=2).stderr
    assert "thanks" in push(100_000).stdout


@pytest.mark.parametrize("seconds", [60, -60])
def test_a_clock_is_wrong_also_through_ssh(lab2: Lab, seconds: int) -> None:
    node1, node2 = lab2.hosts
    now = f"{sys.executable} -c 'import time; print(time.time())'"

    def is_ahead(host: Host, command: list[str], by_s: float) -> bool:
        before = time.time()
        told = float(host.run(command).stdout)
        # However long it took to be told, it was read in between.
        return before - 1 <= told - by_s <= time.time() + 1

    with faults.injected(lab2, faults.ClockSkew(host="node2", seconds=seconds)):
        assert is_ahead(node2, ["sh", "-c", now], seconds)
        assert is_ahead(node1, ["ssh", "node2", now], seconds)
        assert is_ahead(node1, ["sh", "-c", now], 0)
    assert is_ahead(node2, ["sh", "-c", now], 0)
    assert is_ahead(node1, ["ssh", "node2", now], 0)


WAIT_UNTIL = """
import ctypes, threading, time
class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
libc = ctypes.CDLL(None)
room, mutex = (ctypes.create_string_buffer(128) for _ in range(2))
def waited(wait):
    start = time.monotonic()
    until = time.time() + 0.3
    wait(ctypes.byref(Timespec(int(until), int(until % 1 * 1e9))))
    return time.monotonic() - start
print(waited(lambda until: libc.sem_timedwait(room, until)))
libc.pthread_mutex_lock(mutex)
condition = ctypes.create_string_buffer(128)
print(waited(lambda until: libc.pthread_cond_timedwait(condition, mutex, until)))
start = time.monotonic()
threading.Event().wait(0.3)
print(time.monotonic() - start)
"""


def test_waits_are_as_long_as_ever_under_a_wrong_clock(lab2: Lab) -> None:
    node1, _ = lab2.hosts
    with faults.injected(lab2, faults.ClockSkew(host="node1", seconds=60)):
        done = node1.run([*PYTHON, WAIT_UNTIL])
    waited = [float(one) for one in done.stdout.split()]
    assert len(waited) == 3
    # Not the minute by which the clock is wrong; a busy machine may take some of it.
    assert all(0.1 < seconds < 50 for seconds in waited), waited


def test_a_link_is_cut_and_comes_back(lab3: Lab) -> None:
    node1, node2, node3 = lab3.hosts
    with faults.injected(lab3, faults.LinkCut(host="node2")):
        # That nobody is there the network knows after 3 s; who looks late hears of it.
        assert connect(node1, "node2")[0] in ("timed out", "EHOSTUNREACH")
        assert connect(node2, "node1")[0] in ("timed out", "EHOSTUNREACH", "ENETUNREACH")
        assert connect(node1, node3.address)[0] == "connected"
    assert connect(node1, "node2", timeout_s=30)[0] == "connected"


def test_a_host_is_killed_without_a_word_and_boots_again(lab2: Lab) -> None:
    node1, node2 = lab2.hosts
    session = node1.popen(["ssh", "node2", "echo ready; sleep 100"], stdout=subprocess.PIPE)
    assert session.stdout is not None
    assert session.stdout.readline() == "ready\n"
    before = node2.pids()
    undo = faults.HostKilled(host="node2").apply(lab2)
    assert before
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert node2.pids() == []
    assert connect(node1, "node2")[0] in ("timed out", "EHOSTUNREACH")
    assert session.poll() is None  # nobody told it
    with pytest.raises(RuntimeError, match="node2 is not up"):
        node2.run(["true"])
    undo()
    assert node1.run(["ssh", "node2", "hostname"]).stdout == "node2\n"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (faults.NoSshd(host="node2"), "Connection refused"),
        (faults.KeyRefused(host="node2"), "Permission denied (publickey)"),
        (faults.HostKeyChanged(host="node2"), "Host key verification failed"),
    ],
)
def test_ssh_is_refused(lab2: Lab, fault: faults.Fault, said: str) -> None:
    node1, node2 = lab2.hosts
    with faults.injected(lab2, fault):
        refused = node1.run(["ssh", "-o", "BatchMode=yes", "node2", "true"])
        assert refused.returncode == 255
        assert said in refused.stderr
        assert node2.run(["ssh", "node1", "true"]).returncode == 0
    assert node1.run(["ssh", "node2", "true"]).returncode == 0
