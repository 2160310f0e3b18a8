"""The catalogue of faults: what is wrong, how it is injected, and what ``muster check`` must report.

Each entry is data. A fault is applied to a lab, ``muster check`` runs on its first host, and the finding
of this name must be there, with these words. Where the fix is a command, it is run as it stands, and the
next check must not find the fault any more; else undoing the fault stands for what a person does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hosts.faults import (
    ClockSkew,
    ClosedPorts,
    Delay,
    DockerBridge,
    Fault,
    HostKeyChanged,
    HostKilled,
    KeyRefused,
    LinkCut,
    Loss,
    Mtu,
    NameLeadsTo,
    NoSshd,
    OnlyOpenPorts,
    PortTaken,
    own_name_is_loopback,
    own_name_is_unknown,
)
from hosts.machine_faults import (
    ControlGroup,
    FileReads,
    Gpus,
    Limit,
    NoRoute,
    OnlyCore,
    Packages,
    SilentNameServer,
    SlowLink,
    SmallFileSystem,
    Variables,
)
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario

MIB = 1 << 20
FAULTY_RANKS = Path(__file__).parents[1] / "ranks" / "faulty"


@dataclass(frozen=True, kw_only=True)
class Command:
    """The line of the fix that contains ``line`` mends it when it is run on ``host``."""

    host: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Catalogued:
    """One fault: ``finding`` is its name, ``says`` what must be in its words, ``fix`` in its fix.

    ``ranks``: it is seen only when real ranks run.
    """

    name: str
    faults: Sequence[Fault]
    finding: str
    says: Sequence[str]
    fix: str
    mended_by: Command | None = None
    hosts: int = 2
    ranks: bool = False
    flags: Sequence[str] = ()
    host_words: str = ""  # what --hosts is given, where it is not all of them


def _gpu(change: Callable[[Scenario], object]) -> Scenario:
    scenario = scenarios.eight_a100_idle()
    change(scenario)
    return scenario


def _cuda_torch(version: str = "2.13.0+cu130", cuda: str = "13.0") -> dict[str, str]:
    return {
        "torch/__init__.py": "",
        "torch/version.py": f"__version__ = '{version}'\ncuda = '{cuda}'\nhip = None\n",
    }


NETWORK = [
    Catalogued(
        name="the first host's firewall drops the rendezvous port",
        faults=[ClosedPorts(host="node1", ports=(29400,))],
        finding="rendezvous-port-blocked",
        says=["node2", "node1", "29400", "dropped"],
        fix="iptables",
        mended_by=Command(host="node1", line="iptables"),
    ),
    Catalogued(
        name="a firewall rejects the rendezvous port",
        faults=[ClosedPorts(host="node1", ports=(29400,), verdict="refuse")],
        finding="rendezvous-port-blocked",
        says=["node2", "node1", "29400", "refused"],
        fix="iptables",
        mended_by=Command(host="node1", line="iptables"),
    ),
    Catalogued(
        name="a firewall prohibits the rendezvous port",
        faults=[ClosedPorts(host="node1", ports=(29400,), verdict="prohibit")],
        finding="rendezvous-port-blocked",
        says=["node2", "node1", "29400", "prohibited"],
        fix="iptables",
        mended_by=Command(host="node1", line="iptables"),
    ),
    Catalogued(
        name="only ssh and the rendezvous port are open on the first host",
        faults=[OnlyOpenPorts(host="node1", ports=(2222, 29400))],
        finding="data-ports-blocked",
        says=["node2", "node1", "29400", "dropped"],
        fix="iptables",
        mended_by=Command(host="node1", line="iptables"),
    ),
    Catalogued(
        name="the second host's firewall drops the ports of ranks",
        faults=[OnlyOpenPorts(host="node2", ports=(2222,))],
        finding="blocked-dropped",
        says=["node1", "node2", "dropped"],
        fix="iptables",
        mended_by=Command(host="node2", line="iptables"),
    ),
    Catalogued(
        name="the second host's firewall rejects the ports of ranks",
        faults=[OnlyOpenPorts(host="node2", ports=(2222,), verdict="refuse")],
        finding="blocked-rejected",
        says=["node1", "node2", "refused"],
        fix="iptables",
        mended_by=Command(host="node2", line="iptables"),
    ),
    Catalogued(
        name="the third host's firewall prohibits the ports of ranks",
        faults=[OnlyOpenPorts(host="node3", ports=(2222,), verdict="prohibit")],
        hosts=3,
        finding="blocked-prohibited",
        says=["node3", "prohibited"],
        fix="iptables",
        mended_by=Command(host="node3", line="iptables"),
    ),
    Catalogued(
        name="one host has no route to another",
        faults=[NoRoute(host="node2", target="node3")],
        hosts=3,
        finding="no-route",
        says=["node2", "node3"],
        fix="ip route get",
    ),
    Catalogued(
        name="large packets are lost on the path",
        faults=[Mtu(host="node2"), Mtu(host="node3")],
        hosts=3,
        finding="stalled-link",
        says=["node2", "node3"],
        fix="mtu 1500",
        mended_by=Command(host="node2", line="mtu 1500"),
    ),
    Catalogued(
        name="a link of 20 Mbit/s",
        faults=[SlowLink(host="node2", mbits=20)],
        finding="slow-link",
        says=["node2"],
        fix="ethtool",
    ),
    Catalogued(
        name="one host of four on a slow link",
        faults=[SlowLink(host="node3", mbits=50)],
        hosts=4,
        finding="slow-link",
        says=["node3"],
        fix="ethtool",
    ),
    Catalogued(
        name="5 % of the packets are lost",
        faults=[Loss(host="node2", percent=5)],
        finding="slow-link",
        says=["node2"],
        fix="ethtool",
    ),
    Catalogued(
        name="100 ms round trip to one host",
        faults=[Delay(host="node2")],
        finding="slow-link",
        says=["node2"],
        fix="",
    ),
    Catalogued(
        name="GLOO_SOCKET_IFNAME names no interface",
        faults=[Variables(host="node2", values={"GLOO_SOCKET_IFNAME": "ens5"})],
        finding="socket-interface",
        says=["node2", "GLOO_SOCKET_IFNAME", "ens5"],
        fix="eth0",
    ),
    Catalogued(
        name="GLOO_SOCKET_IFNAME is loopback",
        faults=[Variables(host="node2", values={"GLOO_SOCKET_IFNAME": "lo"})],
        finding="socket-interface",
        says=["node2", "GLOO_SOCKET_IFNAME", "lo"],
        fix="eth0",
    ),
    Catalogued(
        name="GLOO_SOCKET_IFNAME is docker0, which all hosts have",
        faults=[
            DockerBridge(),
            Variables(host="node2", values={"GLOO_SOCKET_IFNAME": "docker0"}),
        ],
        finding="socket-interface",
        says=["node2", "GLOO_SOCKET_IFNAME", "docker0"],
        fix="eth0",
    ),
    Catalogued(
        name="NCCL_SOCKET_IFNAME matches nothing",
        faults=[
            Gpus(
                host="node2",
                scenario=scenarios.eight_a100_idle(),
                others={"NCCL_SOCKET_IFNAME": "ib9"},
            )
        ],
        finding="socket-interface",
        says=["node2", "NCCL_SOCKET_IFNAME", "ib9"],
        fix="eth0",
    ),
]

MACHINES_AWAY = [
    Catalogued(
        name="the ssh key is refused",
        faults=[KeyRefused(host="node2")],
        finding="ssh-key-refused",
        says=["node2", "does not accept your key"],
        fix="ssh-copy-id",
    ),
    Catalogued(
        name="the host key has changed",
        faults=[HostKeyChanged(host="node2")],
        finding="ssh-host-key-unknown",
        says=["node2", "host key differs"],
        fix="ssh-keygen -f",
    ),
    Catalogued(
        name="no ssh server",
        faults=[NoSshd(host="node2")],
        finding="ssh-not-served",
        says=["node2", "no ssh server"],
        fix="systemctl enable --now ssh",
    ),
    Catalogued(
        name="a host's cable is disconnected",
        faults=[LinkCut(host="node2")],
        finding="host-unreachable",
        says=["node2", "does not answer"],
        fix="ping node2",
    ),
    Catalogued(
        name="a host is switched off",
        faults=[HostKilled(host="node3")],
        hosts=3,
        finding="host-unreachable",
        says=["node3", "it is off"],
        fix="ping node3",
    ),
    Catalogued(
        name="a host name that cannot be resolved",
        faults=[],
        host_words="node1,node9",
        finding="host-name-unknown",
        says=["node9"],
        fix="/etc/hosts",
    ),
]

NAMES_AND_CLOCKS = [
    Catalogued(
        name="the hostname resolves to 127.0.1.1",
        faults=[own_name_is_loopback("node2")],
        finding="name-is-loopback",
        says=["node2", "127.0.1.1"],
        fix="/etc/hosts",
    ),
    Catalogued(
        name="the hostname cannot be resolved",
        faults=[own_name_is_unknown("node2")],
        finding="name-unresolvable",
        says=["node2"],
        fix="/etc/hosts",
        mended_by=Command(host="node2", line="/etc/hosts"),
    ),
    Catalogued(
        name="the hostname resolves to another host",
        faults=[NameLeadsTo(host="node2", address="10.77.0.99")],
        finding="name-leads-elsewhere",
        says=["node2", "10.77.0.99"],
        fix="/etc/hosts",
    ),
    Catalogued(
        name="a name server that does not answer",
        faults=[SilentNameServer(host="node2")],
        finding="reverse-lookup-slow",
        says=["node2"],
        fix="/etc/hosts",
    ),
    Catalogued(
        name="a clock that is a minute behind",
        faults=[ClockSkew(host="node2", seconds=-60)],
        finding="clocks",
        says=["node2", "behind"],
        fix="timedatectl",
    ),
    Catalogued(
        name="a clock that is a minute ahead",
        faults=[ClockSkew(host="node2", seconds=60)],
        finding="clocks",
        says=["node2", "ahead"],
        fix="timedatectl",
    ),
    Catalogued(
        name="a clock that is years behind",
        faults=[ClockSkew(host="node2", seconds=-3 * 365 * 86400)],
        finding="clocks",
        says=["node2", "behind"],
        fix="timedatectl",
    ),
    Catalogued(
        name="another program uses the default rendezvous port",
        faults=[PortTaken(host="node1", port=29400)],
        finding="port-taken",
        says=["node1", "29400"],
        fix="",
    ),
    Catalogued(
        name="MASTER_PORT is a port in use",
        faults=[
            PortTaken(host="node2", port=29511),
            Variables(host="node2", values={"MASTER_PORT": "29511"}),
        ],
        finding="master-port-taken",
        says=["node2", "29511"],
        fix="",
    ),
]

WITHIN = [
    Catalogued(
        name="/dev/shm with a container's default size",
        faults=[SmallFileSystem(host="node2", path="/dev/shm", size_bytes=64 * MIB)],
        finding="shared-memory-small",
        says=["node2", "64.0 MiB"],
        fix="--shm-size",
        mended_by=Command(host="node2", line="remount,size"),
    ),
    Catalogued(
        name="/dev/shm is full",
        faults=[
            SmallFileSystem(
                host="node2", path="/dev/shm", size_bytes=256 * MIB, used_bytes=255 * MIB
            )
        ],
        finding="shared-memory-full",
        says=["node2", "/dev/shm"],
        fix="/dev/shm",
    ),
    Catalogued(
        name="a low limit of open files",
        faults=[Limit(host="node2", name="RLIMIT_NOFILE", most=256)],
        finding="open-files-low",
        says=["node2", "256"],
        fix="ulimit -n",
    ),
    Catalogued(
        name="a cgroup with little memory",
        faults=[
            ControlGroup(
                host="node2",
                controller="memory",
                settings={"memory.limit_in_bytes": str(700 * MIB)},
            )
        ],
        finding="memory-limit",
        says=["node2", "700 MiB"],
        fix="--mem",
    ),
    Catalogued(
        name="a quota of half a core",
        faults=[
            ControlGroup(host="node2", controller="cpu", settings={"cpu.cfs_quota_us": "50000"})
        ],
        finding="cpu-quota",
        says=["node2", "0.5"],
        fix="--cpus",
    ),
    Catalogued(
        name="one core of several",
        faults=[OnlyCore(host="node2")],
        finding="cpu-affinity",
        says=["node2", "one core"],
        fix="",
    ),
    Catalogued(
        name="the disk for runs is full",
        faults=[SmallFileSystem(host="node2", path="work", size_bytes=MIB, used_bytes=MIB - 4096)],
        finding="run-folder-full",
        says=["node2", "full"],
        fix="--runs",
    ),
    Catalogued(
        name="the disk for runs is read-only",
        faults=[SmallFileSystem(host="node2", path="work", size_bytes=64 * MIB, read_only=True)],
        finding="run-folder-not-writable",
        says=["node2", "cannot write to"],
        fix="",
    ),
    Catalogued(
        name="more threads than cores in every rank",
        faults=[Variables(host="node2", values={"OMP_NUM_THREADS": "64"})],
        finding="too-many-threads",
        says=["node2", "OMP_NUM_THREADS"],
        fix="unset OMP_NUM_THREADS",
    ),
    Catalogued(
        name="WSL 2 with NAT networking",
        faults=[
            FileReads(
                host="node2",
                path="/proc/version",
                text="Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x) #1 SMP\n",
            ),
            FileReads(
                host="node2",
                path="/proc/sys/kernel/osrelease",
                text="5.15.153.1-microsoft-standard-WSL2\n",
            ),
        ],
        finding="wsl2-nat",
        says=["node2", "WSL 2"],
        fix="networkingMode=mirrored",
    ),
]

INSTALLATION = [
    Catalogued(
        name="another version of torch",
        faults=[
            Packages(
                host="node2",
                files={
                    "torch/__init__.py": "",
                    "torch/version.py": "__version__ = '2.12.0+cpu'\ncuda = None\nhip = None\n",
                },
            )
        ],
        finding="torch-version",
        says=["node2", "2.12.0"],
        fix="pip install",
    ),
    Catalogued(
        name="torch that cannot be imported",
        faults=[Packages(host="node2", files={"torch/__init__.py": "raise ImportError\n"})],
        finding="torch-broken",
        says=["node2", "torch"],
        fix="pip install",
    ),
    Catalogued(
        name="a torch.py of the user shadows torch",
        faults=[Packages(host="node2", files={"torch.py": "print('hello')\n"})],
        finding="module-shadowed",
        says=["node2", "torch.py"],
        fix="my_torch.py",
        mended_by=Command(host="node2", line="mv "),
    ),
    Catalogued(
        name="NumPy 2 with a torch that was built for NumPy 1",
        faults=[
            Packages(
                host="node2",
                files={
                    "torch/__init__.py": "",
                    "torch/version.py": "__version__ = '2.2.0+cpu'\ncuda = None\nhip = None\n",
                    "torch-2.2.0.dist-info/METADATA": (
                        "Metadata-Version: 2.1\nName: torch\nVersion: 2.2.0\n"
                    ),
                    "numpy/__init__.py": "",
                    "numpy/version.py": "version = '2.1.0'\n",
                    "numpy-2.1.0.dist-info/METADATA": (
                        "Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n"
                    ),
                },
            )
        ],
        finding="numpy-abi",
        says=["node2", "NumPy", "2.1.0"],
        fix="numpy<2",
    ),
    Catalogued(
        name="torchvision for another torch",
        faults=[
            Packages(
                host="node2",
                files={
                    "torchvision-0.15.2.dist-info/METADATA": (
                        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.15.2\n"
                        "Requires-Dist: torch (==2.0.1)\n"
                    )
                },
            )
        ],
        finding="torch-companion-mismatch",
        says=["node2", "torchvision", "0.15.2"],
        fix="pip install",
    ),
]

GPUS = [
    Catalogued(
        name="a GPU has fallen off the bus",
        faults=[Gpus(host="node2", scenario=scenarios.one_failing())],
        finding="gpu-unreachable",
        says=["node2", "GPU 2"],
        fix="dmesg",
    ),
    Catalogued(
        name="a GPU has uncorrectable memory errors",
        faults=[
            Gpus(
                host="node2",
                scenario=_gpu(lambda s: s["devices"][2]["ecc"].update(uncorrected=3)),
            )
        ],
        finding="ecc-uncorrected",
        says=["node2", "GPU 2"],
        fix="nvidia-smi -r -i",
    ),
    Catalogued(
        name="a GPU is too hot",
        faults=[
            Gpus(
                host="node2",
                scenario=_gpu(
                    lambda s: s["devices"][3].update(temperature_c=91, throttle_reasons=0x40)
                ),
            )
        ],
        finding="gpu-hot",
        says=["node2", "GPU 3", "91"],
        fix="",
    ),
    Catalogued(
        name="a GPU is slowed down by its power supply",
        faults=[
            Gpus(
                host="node2",
                scenario=_gpu(lambda s: s["devices"][1].update(throttle_reasons=0x80)),
            )
        ],
        finding="gpu-slowed",
        says=["node2", "GPU 1"],
        fix="",
    ),
    Catalogued(
        name="an NVLink is down",
        faults=[
            Gpus(
                host="node2",
                scenario=_gpu(
                    lambda s: s["devices"][4].update(
                        nvlinks=[{**s["devices"][4]["nvlinks"][0], "lanes": 10}]
                    )
                ),
            )
        ],
        finding="nvlink-down",
        says=["node2", "GPU 4"],
        fix="nvidia-smi nvlink",
    ),
    Catalogued(
        name="the driver and its library have different versions",
        faults=[Gpus(host="node2", scenario=scenarios.driver_mismatch())],
        finding="driver-library-mismatch",
        says=["node2", "driver"],
        fix="reboot",
    ),
    Catalogued(
        name="the driver is not loaded",
        faults=[Gpus(host="node2", scenario=scenarios.driver_not_loaded())],
        finding="driver-not-loaded",
        says=["node2", "driver"],
        fix="modprobe nvidia",
    ),
    Catalogued(
        name="the driver is too old for this torch",
        faults=[
            Gpus(
                host="node2",
                scenario=_gpu(lambda s: s["driver"].update(version="470.57.02", cuda=11040)),
            ),
            Packages(host="node2", files=_cuda_torch()),
        ],
        finding="driver-too-old",
        says=["node2", "470.57.02"],
        fix="driver",
    ),
    Catalogued(
        name="GPUs, and a torch that cannot use them",
        faults=[Gpus(host="node2", scenario=scenarios.eight_a100_idle())],
        finding="torch-build-without-gpu",
        says=["node2", "torch"],
        fix="pip install",
    ),
    Catalogued(
        name="CUDA_VISIBLE_DEVICES names a GPU that does not exist",
        faults=[
            Gpus(
                host="node2",
                scenario=scenarios.eight_a100_idle(),
                others={"CUDA_VISIBLE_DEVICES": "0,1,9,2"},
            )
        ],
        finding="visible-devices-partly-ignored",
        says=["node2", "CUDA_VISIBLE_DEVICES"],
        fix="",
    ),
    Catalogued(
        name="a GPU in compute mode prohibited",
        faults=[
            Gpus(host="node2", scenario=_gpu(lambda s: s["devices"][5].update(compute_mode=2)))
        ],
        finding="gpu-compute-prohibited",
        says=["node2", "GPU 5"],
        fix="nvidia-smi",
    ),
    Catalogued(
        name="GPU memory with a pending repair",
        faults=[
            Gpus(
                host="node2",
                scenario=_gpu(
                    lambda s: s["devices"][6].update(
                        remapped_rows={
                            "correctable": 0,
                            "uncorrectable": 1,
                            "pending": True,
                            "failure": False,
                        }
                    )
                ),
            )
        ],
        finding="gpu-memory-repair-pending",
        says=["node2", "GPU 6"],
        fix="nvidia-smi -r -i",
    ),
]


def _faulty_rank(fault: str) -> Variables:
    """On the second machine torch does something wrong, by a ``sitecustomize`` that Python runs first."""
    return Variables(host="node2", values={"PYTHONPATH": str(FAULTY_RANKS), "FAULT": fault})


RANKS = [
    Catalogued(
        name="one value in a million that a host sends is wrong",
        faults=[_faulty_rank("corrupt-sum")],
        ranks=True,
        finding="wrong-values",
        says=["node2"],
        fix="",
    ),
    Catalogued(
        name="one value in a million that a host receives is wrong",
        faults=[_faulty_rank("corrupt-result")],
        ranks=True,
        finding="wrong-values",
        says=["node2"],
        fix="",
    ),
    Catalogued(
        name="a host receives zeros from its peer",
        faults=[_faulty_rank("p2p-zeros")],
        ranks=True,
        finding="wrong-values",
        says=["node2"],
        fix="NCCL_P2P_DISABLE=1",
    ),
    Catalogued(
        name="a device computes wrong products",
        faults=[_faulty_rank("wrong-matmul")],
        ranks=True,
        finding="wrong-device",
        says=["node2"],
        fix="",
    ),
    Catalogued(
        name="a device is five times slower than the others",
        faults=[_faulty_rank("slow-matmul")],
        ranks=True,
        finding="slow-device",
        says=["node2"],
        fix="",
    ),
    Catalogued(
        name="a rank never reaches the first all-reduce",
        faults=[_faulty_rank("hang")],
        ranks=True,
        finding="collective-hangs",
        says=["node2"],
        fix="",
    ),
]

GROUPS = {
    "Network": NETWORK,
    "Unreachable hosts": MACHINES_AWAY,
    "Names, clocks and ports": NAMES_AND_CLOCKS,
    "One host": WITHIN,
    "Installed software": INSTALLATION,
    "GPUs": GPUS,
    "Running ranks": RANKS,
}
ALL = [one for group in GROUPS.values() for one in group]
