"""A real Slurm cluster on this machine: munged, slurmctld, and a slurmd on each of several "machines".

A machine is a network namespace with its own address, hosts file and hostname; all of them share this
machine's disk, as clusters do. Nothing appears in the root network namespace. Each machine has GPUs
that Slurm counts and hands out, though they are only null devices. The partition ``hi`` takes nodes
away from jobs of the partition ``main``, which are then put back into the queue.

The clients in ``bin`` behave as if typed on the first machine, wherever they are started from; inside
a job they are the plain ones of that job's machine.
"""

import ctypes
import itertools
import os
import re
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from patience import GIVE_UP_S

INSTALL = "apt-get install slurmctld slurmd slurm-client munge iproute2"
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "unshare", "setpriv")
_CLIENTS = ("sbatch", "squeue", "scontrol", "sinfo", "scancel", "srun", "salloc")
_LABS = itertools.count(1)  # so that several labs can live side by side


def missing() -> str:
    """Say what keeps the lab from running here; nothing if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of network namespaces needs root"
    absent = [name for name in _NEEDED if shutil.which(name) is None]
    return f"{', '.join(absent)} missing: {INSTALL}" if absent else ""


def await_until(holds: Callable[[], bool], what: str, patience_s: float = GIVE_UP_S) -> None:
    """Wait for something outside of this process that sends no event."""
    end = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"not within {patience_s:.0f} s: {what}")
        time.sleep(0.05)


@dataclass(kw_only=True)
class SlurmLab:
    """``with SlurmLab(folder=…) as lab``; the folder's path should be short (it holds a socket)."""

    folder: Path
    machines: int = 3
    gpus: int = 4
    # Who of a job gets SIGTERM: everybody (linuxproc), or the first of each step (pgid, as cgroup has it).
    proctrack: str = "linuxproc"
    kill_wait_s: int = 30  # between asking a job to end and ending it
    # A daemon that is silent for so long is dead: a busy machine may let any of them wait for a while.
    silent_s: int = 100
    _prefix: str = field(default_factory=lambda: f"musl{os.getpid()}-{next(_LABS)}-")
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The machines, in Slurm's order."""
        return [f"node{number}" for number in range(1, self.machines + 1)]

    @property
    def variables(self) -> dict[str, str]:
        """What to set so that Slurm's clients speak to this cluster."""
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }

    def run(self, *command: str, check: bool = True, stdin: str = "") -> str:
        """Run a client to its end and return what it said, errors included."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.variables},
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=GIVE_UP_S,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}")
        return done.stdout

    def on(self, machine: str, command: Sequence[str]) -> list[str]:
        """Return the argument vector that runs a command on a machine, as this same process."""
        become = 'hostname "$0" && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", become, machine, *command]
        return ["ip", "netns", "exec", self._namespace(machine), *inside]

    @contextmanager
    def in_network_of(self, machine: str) -> Iterator[None]:
        """Let this thread, and the processes it starts, use the network of a machine meanwhile."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with (
            Path("/proc/thread-self/ns/net").open() as here,
            Path("/run/netns", self._namespace(machine)).open() as there,
        ):
            if setns(there.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                setns(here.fileno(), 0)

    def pids_on(self, machine: str) -> set[int]:
        """The processes that are alive on a machine."""
        listed = _ip("netns", "pids", self._namespace(machine))
        return {int(word) for word in listed.split()}

    def end_machine(self, machine: str) -> None:
        """As if its power went: slurmd and all that it started are gone at once."""
        daemon = self._daemons.pop(f"slurmd-{machine}")
        daemon.kill()
        daemon.wait()
        for pid in self.pids_on(machine):
            if pid not in self._daemon_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)

    def start_machine(self, machine: str) -> None:
        """Start a machine's slurmd."""
        (self.folder / "spool" / machine).mkdir(exist_ok=True)
        command = ["slurmd", "-D", "-N", machine, "-f", str(self.folder / "slurm.conf")]
        self._start(f"slurmd-{machine}", self.on(machine, command))

    def await_idle(self) -> None:
        """Wait until no job is left and every machine can take one."""
        await_until(lambda: not self.run("squeue", "-h"), "an empty queue")
        listing = ("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N %T")

        def all_idle() -> bool:
            lines = self.run(*listing).splitlines()
            return len([line for line in lines if line.endswith(" idle")]) == self.machines

        await_until(all_idle, "all machines idle")

    def clear(self) -> None:
        """Cancel every job and wait until every machine can take one."""
        jobs = self.run("squeue", "-h", "-o", "%A").split()
        if jobs:
            self.run("scancel", *jobs, check=False)
        self.await_idle()

    def __enter__(self) -> "SlurmLab":
        remove_abandoned()
        try:
            self._lay_out()
            self._start("munged", self._munged())
            await_until((self.folder / "run" / "munge.sock").is_socket, "munged's socket")
            controller = ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")]
            self._start("slurmctld", self.on(self.names[0], controller))
            # First: it asks for machines that it missed only after a while.
            await_until(self._controller_answers, "slurmctld answers")
            for machine in self.names:
                self.start_machine(machine)
            self.await_idle()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tear_down()

    def _controller_answers(self) -> bool:
        return "is UP" in self.run("scontrol", "ping", check=False)

    def _namespace(self, machine: str) -> str:
        return f"{self._prefix}{machine}"

    def _lay_out(self) -> None:
        for part in ("run", "log", "state", "spool", "devices", "bin"):
            (self.folder / part).mkdir(parents=True)
        (self.folder / "run").chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for number in range(self.gpus):
            null = os.makedev(1, 3)
            os.mknod(self.folder / "devices" / f"gpu{number}", stat.S_IFCHR | 0o666, null)
        (self.folder / "gres.conf").write_text(
            f"Name=gpu Type=a100 File={self.folder}/devices/gpu[0-{self.gpus - 1}]\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(self._settings())
        for name in _CLIENTS:
            wrapper = self.folder / "bin" / name
            real = shutil.which(name)
            wrapper.write_text(
                "#!/bin/sh\n"
                f'case "$(hostname)" in node*) exec {real} "$@";; esac\n'
                f'exec {shlex.join(self.on(self.names[0], [str(real)]))} "$@"\n'
            )
            wrapper.chmod(0o755)
        self._wire_up()

    def _wire_up(self) -> None:
        switch = f"{self._prefix}switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{_address(number)} {name}\n" for number, name in enumerate(self.names, 1)
        )
        for number, machine in enumerate(self.names, 1):
            namespace = self._namespace(machine)
            etc = Path("/etc/netns") / namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(hosts)
            (etc / "resolv.conf").write_text("")
            _ip("netns", "add", namespace)
            port = f"p{number}"
            veth = ("link", "add", "eth0", "netns", namespace, "type", "veth")
            _ip(*veth, "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", namespace, "addr", "add", f"{_address(number)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def _settings(self) -> str:
        here = self.folder
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={_address(number)} CPUs=4 RealMemory=4000"
            f" Gres=gpu:a100:{self.gpus} State=UNKNOWN"
            for number, name in enumerate(self.names, 1)
        )
        return f"""\
ClusterName=lab
SlurmctldHost={self.names[0]}({_address(1)})
AuthType=auth/munge
# How long a requeued job waits is tied to how long credentials are good.
AuthInfo=socket={here}/run/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
# Neither systemd nor cgroups are needed.
ProctrackType=proctrack/{self.proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=500
SlurmdParameters=config_overrides
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/run/slurmctld.pid
SlurmdPidFile={here}/run/slurmd.%n.pid
SlurmctldLogFile={here}/log/slurmctld.log
SlurmdLogFile={here}/log/slurmd.%n.log
MpiDefault=none
ReturnToService=2
GresTypes=gpu
JobRequeue=1
KillWait={self.kill_wait_s}
SlurmdTimeout={self.silent_s}
MessageTimeout={max(2, self.silent_s // 3)}
MinJobAge=60
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP PriorityTier=1 GraceTime=2
PartitionName=hi Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=10 PreemptMode=off
"""

    def _munged(self) -> list[str]:
        run = self.folder / "run"
        return [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder / 'munge.key'}",
            f"--socket={run / 'munge.sock'}",
            f"--pid-file={run / 'munged.pid'}",
            f"--log-file={self.folder / 'log' / 'munged.log'}",
            f"--seed-file={run / 'munged.seed'}",
        ]

    def _start(self, name: str, command: Sequence[str]) -> None:
        log = self.folder / "log" / f"{name}.out"
        with log.open("ab") as stream:
            self._daemons[name] = subprocess.Popen(
                # A daemon does not outlive the tests, even if they are killed.
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**_plain_environment(), **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _daemon_pids(self) -> set[int]:
        return {daemon.pid for daemon in self._daemons.values()}

    def _tear_down(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for machine in [*self.names, "switch"]:
            namespace = self._namespace(machine)
            with suppress(subprocess.CalledProcessError):
                _remove(namespace)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove what labs left behind whose tests were killed: their process is gone."""
    for path in Path("/run/netns").glob("musl*-*"):
        owner = re.match(r"musl(\d+)-\d+-", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            with suppress(subprocess.CalledProcessError):  # another run may be at it, too
                _remove(path.name)
            shutil.rmtree(Path("/etc/netns") / path.name, ignore_errors=True)


def _remove(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():  # steps do not end with their slurmd
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    _ip("netns", "del", namespace)


def _address(number: int) -> str:
    return f"10.79.0.{10 + number}"


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _plain_environment() -> Mapping[str, str]:
    """What a daemon of the system would have: nothing of the test's own."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job of the cluster that this process uses, and what it printed."""

    number: str
    log: Path

    @property
    def state(self) -> str:
        """What squeue says: ``RUNNING None node[1-2]``."""
        words = ["--noheader", "--states=all", f"--jobs={self.number}", "--format=%T %r %N"]
        return subprocess.run(["squeue", *words], capture_output=True, text=True).stdout.strip()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def await_output(self, text: str) -> None:
        """Wait until the job has printed a text."""
        await_until(lambda: text in self.output, f"{text!r} in {self.output!r}")

    def await_state(self, *states: str) -> str:
        """Wait until squeue's words begin with one of these."""
        await_until(lambda: self.state.startswith(states), f"{states}, not {self.state}")
        return self.state

    def await_end(self) -> str:
        """Wait until the job is over, and return its state."""
        return self.await_state("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED")
