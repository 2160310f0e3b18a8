"""A rehearsal: the measured launcher, the planner's step time and a published failure rate, put together."""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles

from torchmuster.checkpoints.manifest import FileRecord, Manifest
from torchmuster.errors import MusterError
from torchmuster.rehearse.control_plane import ControlPlane
from torchmuster.rehearse.failures import (
    Costs,
    Fleet,
    PlayedMonth,
    best_interval_s,
    best_spares,
    expected_goodput,
    play,
    value_of_spares,
)
from torchmuster.units import plural

# Adam in fp32: weights and two moments, which is what muster train saves.
BYTES_PER_PARAMETER = 12
MOST_SIMULATED = 8192
_QUIET_S, _CHATTY_S = 8.0, 0.0
_MONTHS = 50
_COPY_BYTES_PER_S = 10e9  # from a GPU to its host
# docs/measured/save-planning.md, for a 70B model: a rank's plan, the CPU time of the store for one exchange, and rank 0's commit.
_PLAN_S = 0.4
EXCHANGE_S_PER_RANK = 50e-6
COMMIT_S_PER_RANK = 6.36 / 16_384
_EXCHANGES_TO_SAVE = 2  # checkpointer.py: the layouts, the files
_EXCHANGES_TO_LOAD = 9  # loading.py: 5; disk_check.py, before the first step: 4
# docs/measured/takeover.md: everything after the stop, with ranks that are forked.
_WARM_START_S = 2.1
USUAL_INTERVAL_S = 600.0  # the default of checkpoint.every
_POINTS = 25  # of the curve over the save interval


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """What is rehearsed. ``parameters`` None: saving and failures are left out."""

    hosts: int
    gpus_per_host: int = 8
    parameters: float | None = None
    step_s: float | None = None
    write_bytes_per_s: float = 1e9  # of each host
    repair_s: float = 86_400.0
    spares: int | None = None  # None: as many as are worth having
    elastic: bool = False  # continue with fewer hosts if no spare is left
    gpu_hours_per_failure: float


@dataclass(frozen=True, kw_only=True)
class HostStart:
    """What one host does until its script begins, measured here: node agent, torchrun, torch, one rank."""

    seconds: float
    cpu_s: float  # without the launcher's own
    launcher_cpu_s: float  # of a launcher with one host, most of it imports


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint of the run."""

    size_bytes: float
    files: int
    manifest_bytes: int
    write_s: float  # written and read back
    agree_s: float  # the ranks agree on what each writes and has written, and rank 0 commits
    save_s: float
    stall_s: float  # the update that waits for the copy; without a step time, as if no step ran meanwhile
    load_s: float


@dataclass(frozen=True, kw_only=True)
class FailureForecast:
    """What failures mean for the run."""

    costs: Costs
    failure_every_s: float
    interval_s: float
    spares: int
    months: tuple[PlayedMonth, ...]
    usual_goodput: float  # with a save every `USUAL_INTERVAL_S`
    low: float  # of the goodput: 5 and 95 of 100 months lie outside
    high: float
    over_interval: tuple[tuple[float, float], ...]
    over_spares: tuple[tuple[int, float], ...]

    @property
    def goodput(self) -> float:
        """The mean goodput."""
        return fmean(one.goodput for one in self.months)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result."""

    request: RehearsalRequest
    control: ControlPlane
    host: HostStart
    saving: Saving | None
    failures: FailureForecast | None

    @property
    def start_s(self) -> float:
        """From the command to the first line of the script, if every host has its own cores."""
        return self.control.start_s + self.host.seconds

    def start_on_one_machine_s(self, cores: int) -> float:
        """The same, if all hosts share the cores of one machine, as in the tests."""
        cpu_s = self.host.launcher_cpu_s + self.request.hosts * self.host.cpu_s
        return self.control.start_s + max(self.host.seconds, cpu_s / cores)


def rehearse(request: RehearsalRequest, say: Callable[[str], None]) -> Rehearsal:
    """Measure and compute everything; takes about two minutes for thousands of hosts."""
    if words := _busy_text():
        say(words)
    simulated = min(request.hosts, MOST_SIMULATED)
    say(f"running the launcher with {simulated:,} simulated hosts")
    control = measure_control_plane(simulated, quiet_s=_QUIET_S, chatty_s=_CHATTY_S)
    if simulated < request.hosts:
        say(f"{request.hosts:,} hosts: extrapolated from {simulated:,}")
        control = control.for_hosts(request.hosts)
    say("measuring how long one host takes to start a rank")
    host = measure_host_start()
    saving = None
    failures = None
    if request.parameters is not None:
        saving = forecast_saving(request, request.parameters)
        failures = _forecast_failures(request, control, host, saving)
    return Rehearsal(request=request, control=control, host=host, saving=saving, failures=failures)


def _busy_text() -> str:
    """Return a warning if other processes use the cores of this machine; "" if not."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores / 2:
        return ""
    return (
        f"other processes are using this machine (load {load:.1f} on {plural(cores, 'core')}): the times "
        "measured here will be too long"
    )


def measure_control_plane(hosts: int, *, quiet_s: float, chatty_s: float) -> ControlPlane:
    """Measure the launcher in a process of its own, so that memory and CPU time are its own too."""
    module = "torchmuster.rehearse.control_plane"
    done = subprocess.run(
        [sys.executable, "-m", module, str(hosts), str(quiet_s), str(chatty_s)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise MusterError(
            f"the launcher failed with {hosts:,} simulated hosts",
            why="\n".join(done.stderr.strip().splitlines()[-4:]),
            fix="rehearse fewer hosts, or rerun when this machine is less busy",
        )
    return ControlPlane(**json.loads(done.stdout))


# The command itself, which prints its own CPU time at the end.
_RUN = """
import sys, time
from torchmuster.cli.main import main
code = main(sys.argv[1:])
print(time.process_time())
sys.exit(code)
"""


def measure_host_start() -> HostStart:
    """Run a script that ends at once on this host, and measure it."""
    with tempfile.TemporaryDirectory(prefix="muster-rehearse-") as name:
        script = Path(name) / "first_line.py"
        script.write_text("import time, torch\nprint(time.time(), flush=True)\n")
        before = os.times()
        began = time.time()
        command = [sys.executable, "-c", _RUN, "run", "--device", "cpu", "--ranks", "1"]
        done = subprocess.run(
            [*command, str(script)], cwd=name, capture_output=True, text=True, check=False
        )
        after = os.times()
        logs = sorted(Path(name).glob("runs/*/logs/rank-0.log"))
        if done.returncode or not logs:
            raise MusterError("a rank could not be started here", why=done.stderr.strip()[-500:])
        first_line = float(logs[0].read_text().split()[0])
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    launcher_cpu_s = float(done.stdout.split()[-1])
    return HostStart(
        seconds=first_line - began, cpu_s=cpu_s - launcher_cpu_s, launcher_cpu_s=launcher_cpu_s
    )


def forecast_saving(request: RehearsalRequest, parameters: float) -> Saving:
    """Return size and times of a checkpoint, computed from what was measured with fewer hosts."""
    ranks = request.hosts * request.gpus_per_host
    size_bytes = parameters * BYTES_PER_PARAMETER
    record = FileRecord(size_bytes=round(size_bytes / ranks), sha256="0" * 64)
    folders = [f"ranks-{rank // 500 * 500:05d}/" if rank >= 500 else "" for rank in range(ranks)]
    files = {
        f"{folder}rank-{rank:05d}.{end}": record
        for rank, folder in enumerate(folders)
        for end in _ENDS
    }
    manifest = Manifest(
        name="step-00000001-0000",
        step=1,
        world_size=ranks,
        strategy="fsdp",
        made_unix_s=1.0,
        files=files,
    )
    write_s = 2 * size_bytes / (request.hosts * request.write_bytes_per_s)
    exchange_s = ranks * EXCHANGE_S_PER_RANK
    agree_s = _EXCHANGES_TO_SAVE * exchange_s + ranks * COMMIT_S_PER_RANK
    # Training continues with the next forward and backward; its update waits for the copy.
    copied_s = exchange_s + _PLAN_S + size_bytes / ranks / _COPY_BYTES_PER_S
    return Saving(
        size_bytes=size_bytes,
        files=len(files) + 3,
        manifest_bytes=len(manifest.to_json()),
        write_s=write_s,
        agree_s=agree_s,
        save_s=_PLAN_S + write_s + agree_s,
        stall_s=max(0.0, copied_s - (request.step_s or 0.0)),
        load_s=write_s + _EXCHANGES_TO_LOAD * exchange_s,  # every file is verified, then read
    )


_ENDS = ("safetensors", "json")


def _forecast_failures(
    request: RehearsalRequest, control: ControlPlane, host: HostStart, saving: Saving
) -> FailureForecast:
    # Without spares, a restart tests all links again. A takeover does not: for it, this is an upper limit.
    begun_s = (control.notice_s or 0.0) + control.restart_s
    costs = Costs(
        stall_s=saving.stall_s,
        save_s=saving.save_s,
        restart_s=begun_s + host.seconds + saving.load_s,
        takeover_s=begun_s + _WARM_START_S + saving.load_s,
    )
    fleet = Fleet(
        hosts=request.hosts,
        gpus_per_host=request.gpus_per_host,
        gpu_hours_per_failure=request.gpu_hours_per_failure,
        repair_s=request.repair_s,
        elastic=request.elastic,
    )
    interval_s = max(best_interval_s(costs, fleet), request.step_s or 0.0)
    over_spares = tuple(value_of_spares(fleet, costs, interval_s))
    spares = best_spares(over_spares) if request.spares is None else request.spares
    fleet = replace(fleet, spares=spares)
    months, usual = (
        tuple(play(fleet, costs, every_s, seed=seed) for seed in range(_MONTHS))
        for every_s in (interval_s, USUAL_INTERVAL_S)
    )
    ends = quantiles([one.goodput for one in months], n=20)
    return FailureForecast(
        costs=costs,
        failure_every_s=fleet.failure_every_s,
        interval_s=interval_s,
        spares=spares,
        months=months,
        usual_goodput=fmean(one.goodput for one in usual),
        low=ends[0],
        high=ends[-1],
        over_interval=tuple(
            (one, expected_goodput(one, costs, fleet)) for one in _intervals(interval_s, costs)
        ),
        over_spares=over_spares,
    )


def _intervals(best_s: float, costs: Costs) -> list[float]:
    low = max(costs.save_s, best_s / 20)
    high = best_s * 20
    ratio = math.log(high / low)
    return [low * math.exp(ratio * point / (_POINTS - 1)) for point in range(_POINTS)]
