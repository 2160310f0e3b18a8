"""Checks of GPUs as Muster lists, selects and claims them: against nvidia-smi, NVML, torch and another user."""

import contextlib
import csv
import http.client
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from torchmuster.devices import snapshot
from torchmuster.devices.claims import TOKEN_VARIABLE
from torchmuster.devices.model import Device, DeviceKind, Node
from torchmuster.devices.visibility import STAGES, variables_for, visible
from torchmuster.errors import ExitCode, MusterError, NotNow
from torchmuster.finding import Status
from torchmuster.known_errors.explain import explain_text
from torchmuster.monitor import catalogue
from torchmuster.plan.memory.allocator import ALLOCATOR_SETTING, CachingAllocator
from torchmuster.selftest.check import Check, Facts, NotHere, Outcome, Place, muster_command
from torchmuster.units import MiB, format_bytes

_ANSWER_WITHIN_S = 60.0
_MOST_GPUS = 8
_MOST_SHOWN = 4  # differences that the result names
_MOST_TEXT = 300  # characters of an error


# ---- inventory

# What nvidia-smi calls them; the power limit that applies is the one that Muster reads.
_QUERIED = {
    "uuid": "uuid",
    "name": "name",
    "memory_mib": "memory.total",
    "pci": "pci.bus_id",
    "power_limit_w": "enforced.power.limit",
    "index": "index",
    "driver": "driver_version",
}
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def _inventory(place: Place, planted: bool) -> Facts:
    program = _nvidia_smi()
    query = f"--query-gpu={','.join(_QUERIED.values())}"
    listed = _output_of([program, query, "--format=csv,noheader,nounits"])
    rows = list(csv.reader(io.StringIO(listed), skipinitialspace=True))
    theirs = [dict(zip(_QUERIED, row, strict=True)) for row in rows if len(row) == len(_QUERIED)]
    node = snapshot.take_snapshot()
    gpus = _whole_gpus(node)
    ours = [
        {
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory_mib": None if gpu.total_bytes is None else gpu.total_bytes / MiB,
            "pci": gpu.pci_bus_id,
            "power_limit_w": gpu.power_limit_w,
            "index": gpu.index,
            "driver": node.driver_version,
        }
        for gpu in gpus
    ]
    if planted and ours:
        ours[0]["memory_mib"] = (gpus[0].total_bytes or 0) / MiB / 2
    links = _links_of_both(node, gpus, program) if len(gpus) > 1 else []
    return {"ours": ours, "theirs": theirs, "links": links}


def _nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NotHere("nvidia-smi is not installed")
    return program


def _output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a short command and return its output."""
    try:
        done = subprocess.run(
            command,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MusterError(f"{command[0]} does not answer", why=str(error)) from error
    if done.returncode != 0:
        raise MusterError(
            f"{command[0]} ended with exit code {done.returncode}",
            why=(done.stderr or done.stdout)[-1000:],
        )
    return done.stdout


def _whole_gpus(node: Node) -> list[Device]:
    """Return NVIDIA's GPUs without MIG slices, as nvidia-smi lists them."""
    return [
        gpu for gpu in node.accelerators if gpu.kind is DeviceKind.CUDA and gpu.mig_index is None
    ]


def _links_of_both(node: Node, gpus: Sequence[Device], program: str) -> list[Facts]:
    theirs = parse_topology(_output_of([program, "topo", "-m"]))
    found = []
    for position, a in enumerate(gpus):
        for b in gpus[position + 1 :]:
            link, other = node.link(a, b), theirs.get((a.index, b.index))
            if other is not None:
                ours = None if link is None else link.short
                found.append({"a": a.index, "b": b.index, "ours": ours, "theirs": other})
    return found


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return the links in the output of ``nvidia-smi topo -m``, by the indices of two GPUs; what is not a link is left out."""
    lines = [line.split("\t") for line in _ESCAPES.sub("", text).splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines]
    header = next((row for row in rows if "GPU0" in row and not row[0]), [])
    columns = {at: int(name[3:]) for at, name in enumerate(header) if _is_gpu(name)}
    found = {}
    for row in rows:
        if row and _is_gpu(row[0]):
            for at, other in columns.items():
                if at < len(row) and _LINK.fullmatch(row[at]):
                    found[int(row[0][3:]), other] = row[at]
    return found


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None


def judge_inventory(facts: Facts) -> Outcome:
    """Compare the GPUs and links that Muster lists with those of nvidia-smi."""
    ours = {gpu["uuid"]: gpu for gpu in facts["ours"]}
    theirs = {gpu["uuid"]: gpu for gpu in facts["theirs"]}
    wrong = [f"{uuid} is listed only by Muster" for uuid in ours.keys() - theirs.keys()]
    wrong += [f"{uuid} is listed only by nvidia-smi" for uuid in theirs.keys() - ours.keys()]
    for uuid in ours.keys() & theirs.keys():
        wrong += _different(ours[uuid], theirs[uuid])
    links = facts["links"]
    wrong += [
        f"GPUs {link['a']} and {link['b']}: {link['ours']}, nvidia-smi {link['theirs']}"
        for link in links
        if link["ours"] != link["theirs"]
    ]
    good = f"{len(ours)} GPUs and {len(links)} links as nvidia-smi lists them"
    return Outcome(
        confirmed=bool(ours) and not wrong,
        says=_first_of(wrong) if wrong else good if ours else "Muster lists no GPU",
        figures={"gpus": len(ours), "links": len(links), "differences": len(wrong)},
    )


def _different(ours: Facts, theirs: Mapping[str, str]) -> Iterator[str]:
    where = f"GPU {theirs['index']}"
    for name, tolerance in (("memory_mib", 1.0), ("power_limit_w", 1.0), ("index", 0.0)):
        number = _number(theirs[name])
        if number is None:  # a value that this GPU does not have
            continue
        if ours[name] is None or abs(ours[name] - number) > tolerance:
            yield f"{where}: {name} {ours[name]}, nvidia-smi {theirs[name]}"
    for name in ("name", "driver"):
        if ours[name] != theirs[name]:
            yield f"{where}: {name} {ours[name]}, nvidia-smi {theirs[name]}"
    if pci_address(ours["pci"] or "") != pci_address(theirs["pci"]):
        yield f"{where}: PCI address {ours['pci']}, nvidia-smi {theirs['pci']}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def pci_address(text: str) -> tuple[int, ...]:
    """Return domain, bus, device and function of a PCI address; empty if it is not one."""
    parts = re.split(r"[:.]", text)
    try:
        return tuple(int(part, 16) for part in parts)
    except ValueError:
        return ()


def _first_of(wrong: Sequence[str]) -> str:
    more = len(wrong) - _MOST_SHOWN
    shown = "; ".join(sorted(wrong)[:_MOST_SHOWN])
    return shown + (f"; and {more} more" if more > 0 else "")


# ---- uuid-selection

_PROGRAM = "torchmuster.selftest.probes.devices"
_AT_ONCE = 4


def _uuid_selection(place: Place, planted: bool) -> Facts:
    gpus = visible(snapshot.take_snapshot().accelerators, os.environ).devices
    gpus = tuple(
        gpu for gpu in gpus if gpu.kind in (DeviceKind.CUDA, DeviceKind.ROCM) and not gpu.trouble
    )
    gpus = gpus[:_MOST_GPUS]
    if not gpus:
        raise NotHere("needs an NVIDIA or AMD GPU")
    selected = [variables_for([gpu]) for gpu in gpus]
    if planted:
        empty: dict[str, str | None] = dict.fromkeys(selected[0], "")
        selected = [*selected[1:], selected[0]] if len(gpus) > 1 else [empty]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        seen = list(pool.map(_seen_with, selected))
    return {
        "gpus": [
            {
                "kind": gpu.kind.value,
                "number": gpu.number,
                "uuid": gpu.uuid,
                "pci": gpu.pci_bus_id or "",
                "seen": found,
            }
            for gpu, found in zip(gpus, seen, strict=True)
        ]
    }


def _seen_with(variables: Mapping[str, str | None]) -> list[dict[str, str]]:
    """Return the GPUs that torch sees in a process with these variables."""
    cleared = {name for stages in STAGES.values() for stage in stages for name in stage}
    environment = {name: value for name, value in os.environ.items() if name not in cleared}
    environment |= {name: value for name, value in variables.items() if value is not None}
    found: list[dict[str, str]] = _answer_of("seen", environment)
    return found


def _answer_of(work: str, environment: Mapping[str, str] | None = None) -> Any:
    lines = _output_of([sys.executable, "-m", _PROGRAM, work], environment).splitlines()
    return json.loads(lines[-1])


def judge_uuid_selection(facts: Facts) -> Outcome:
    """Each process sees one GPU, the one that its variables name."""
    wrong = []
    for gpu in facts["gpus"]:
        seen = gpu["seen"]
        if len(seen) != 1:
            wrong.append(f"GPU {gpu['number']} selected, torch sees {len(seen)} GPUs")
        elif not _is_same(gpu, seen[0]):
            wrong.append(f"GPU {gpu['number']} selected, torch sees {seen[0]['pci']}")
    count = len(facts["gpus"])
    return Outcome(
        confirmed=count > 0 and not wrong,
        says=_first_of(wrong) if wrong else f"{count} GPUs selected by UUID, each seen alone",
        figures={"gpus": count, "wrong": len(wrong)},
    )


def _is_same(gpu: Mapping[str, str], seen: Mapping[str, str]) -> bool:
    if gpu["kind"] == DeviceKind.CUDA:
        return _bare_uuid(gpu["uuid"]) == _bare_uuid(seen["uuid"])
    # ROCm's UUID in torch is not the one in the variables.
    return bool(seen["pci"]) and pci_address(gpu["pci"])[:3] == pci_address(seen["pci"])[:3]


def _bare_uuid(text: str) -> str:
    return text.removeprefix("GPU-").removeprefix("MIG-").lower()


# ---- cuda-started


def _cuda_started(place: Place, planted: bool) -> Facts:
    found: Facts = _answer_of("started-late" if planted else "started")
    return found


def judge_cuda_started(facts: Facts) -> Outcome:
    """The driver counts as started after CUDA's start, and not before."""
    good = facts == {"before": False, "imported": False, "after": True}
    states = {True: "started", False: "not started"}
    return Outcome(
        confirmed=good,
        says=f"at first {states[facts['before']]}, after import torch {states[facts['imported']]}, "
        f"after torch.cuda.init() {states[facts['after']]}",
        figures=facts,
    )


# ---- idle-process

_SAMPLES = 6
_SAMPLE_EVERY_S = 1.0  # the driver's own samples cover up to a second


def _idle_process(place: Place, planted: bool) -> Facts:
    work = [sys.executable, "-m", _PROGRAM, "quiet" if planted else "busy"]
    with _started_process(muster_command("gpus", "pick", "--num", "1", "--", *work)) as process:
        _line_from(process)
        samples = []
        record: snapshot.Record = {}
        for _ in range(_SAMPLES):
            node, record = snapshot.update_sightings(record, snapshot.take_snapshot())
            samples += [
                {
                    "at_s": node.taken_unix_s,
                    "idle_s": one.idle_s,
                    "gpu_percent": gpu.utilization_percent,
                    "process_percent": one.utilization_percent,
                }
                for gpu in node.accelerators
                for one in gpu.compute_processes
                if one.pid == process.pid
            ]
            time.sleep(_SAMPLE_EVERY_S)
    if not samples:
        raise NotHere("the driver lists processes by ids of another namespace (a container)")
    return {"samples": samples}


@contextlib.contextmanager
def _started_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a process with pipes; kill it at the end."""
    process = subprocess.Popen(
        command,
        env=None if environment is None else dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line_from(process: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints; it is an error if it ends before."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, errors = process.communicate()
        if process.returncode == ExitCode.NOT_NOW:
            raise NotNow("no GPU is free", why=errors[-1000:])
        raise MusterError(
            f"a process of this check ended with exit code {process.returncode}",
            why=errors[-1000:],
        )
    return line


def judge_idle_process(facts: Facts) -> Outcome:
    """A process whose kernel runs while it sleeps is not idle."""
    samples = facts["samples"]
    watched_s = samples[-1]["at_s"] - samples[0]["at_s"]
    idle_s = samples[-1]["idle_s"]
    good = len(samples) > 1 and idle_s is not None and idle_s <= watched_s / 2
    shown = "unknown" if idle_s is None else f"{idle_s:.1f} s"
    return Outcome(
        confirmed=good,
        says=f"a process with a running kernel that sleeps on the host: idle for {shown} "
        f"of {watched_s:.1f} s, by the snapshots",
        figures={
            "watched_s": watched_s,
            "idle_s": -1.0 if idle_s is None else idle_s,
            "gpu_percent": max(one["gpu_percent"] or 0 for one in samples),
            "process_percent": max(one["process_percent"] or 0 for one in samples),
        },
    )


# ---- claims

_CLAIMING = "torchmuster.selftest.probes.claiming"
_FIRST_FREE_USER = 60000
_LOOK_EVERY_S = 0.2


def _claims(place: Place, planted: bool) -> Facts:
    pick = muster_command("gpus", "pick", "--num", "1", "--", "cat")  # until its stdin is closed
    with _started_process(pick) as holder, contextlib.ExitStack() as stack:
        claimed, free = _await_claim(place, holder)
        environment = {**os.environ}
        environment.pop(TOKEN_VARIABLE, None)  # the second process is under no claim
        if planted:
            environment["TORCHMUSTER_CLAIMS_DIR"] = stack.enter_context(_folder_for_all())
        user = _other_user()
        same = _claimed_by(user, claimed, environment)
        other = _claimed_by(user, free[0], environment) if free else None
    return {
        "holder": holder.pid,
        "same": same,
        "other": other,
        "second_user": same["user_id"] != os.geteuid(),
    }


def _await_claim(place: Place, holder: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Wait until ``muster gpus`` shows the claim; return the GPU's UUID, and those that others can claim."""
    while True:
        listed = json.loads(place.muster("gpus", "--json", accepted=(0, 1)))["accelerators"]
        claims = {gpu["uuid"]: gpu["claim"] for gpu in listed if gpu["visible"]}
        free = [uuid for uuid, claim in claims.items() if claim is None]
        for uuid, claim in claims.items():
            if claim is not None and claim["pid"] == holder.pid:
                return uuid, free
        if holder.poll() is not None:
            _line_from(holder)  # raises
        time.sleep(_LOOK_EVERY_S)


@contextlib.contextmanager
def _folder_for_all() -> Iterator[str]:
    """Yield a folder that all users may write."""
    with tempfile.TemporaryDirectory(prefix="muster-selftest-claims-") as folder:
        Path(folder).chmod(0o1777)
        yield folder


def _other_user() -> int | None:
    """Return the id of a user that does not exist, if this process may become one."""
    if os.geteuid() != 0:
        return None
    import pwd

    known = {one.pw_uid for one in pwd.getpwall()}
    return next(number for number in itertools.count(_FIRST_FREE_USER) if number not in known)


def _claimed_by(user: int | None, uuid: str, environment: Mapping[str, str]) -> Facts:
    command = [sys.executable, "-m", _CLAIMING, uuid, *([] if user is None else [str(user)])]
    found: Facts = json.loads(_output_of(command, environment).splitlines()[-1])
    return found


def judge_claims(facts: Facts) -> Outcome:
    """A claimed GPU is refused to others; another one is not."""
    same, other = facts["same"], facts["other"]
    who = "another user" if facts["second_user"] else "the same user (another one needs root)"
    wrong = []
    if same["got"]:
        wrong.append(f"{who} got a GPU that is claimed")
    elif same["error"] != "DevicesBusy" or f"pid {facts['holder']}," not in same["why"]:
        wrong.append(f"{who} was refused a GPU, but not because of its claim: {same['why']}")
    if other is not None and not other["got"]:
        wrong.append(f"{who} was refused a free GPU: {other['why']}")
    second = "got a free one" if other is not None else "there is no other GPU"
    return Outcome(
        confirmed=not wrong,
        says="; ".join(wrong) or f"{who} was refused a claimed GPU; {second}",
        figures={"second_user": facts["second_user"], "other_gpu": other is not None},
    )


# ---- exporter

# Each value of the exporter with its tolerance on both sides of what NVML reports.
_EXPORTED = {
    "used_bytes": (catalogue.GPU_MEMORY_USED, 64 * MiB),
    "usable_bytes": (catalogue.GPU_MEMORY_USABLE, MiB),
    "temperature_c": (catalogue.GPU_TEMPERATURE, 3.0),
    "power_limit_w": (catalogue.GPU_POWER_LIMIT, 1.0),
    "utilization": (catalogue.GPU_UTILIZATION, 0.25),
    "energy_j": (catalogue.GPU_ENERGY, 2.0),
}
_ROUNDS = 3  # a busy GPU changes while it is read
_SERVED_AT = re.compile(r"http://([\d.]+):(\d+)/metrics")

Readings = dict[str, dict[str, float]]  # by UUID and name


def _exporter(place: Place, planted: bool) -> Facts:
    command = muster_command("exporter", "--port", "0", "--runs", str(place.scratch()))
    with _started_process(command) as server:
        where = _served_at(server)
        rounds = []
        for _ in range(_ROUNDS):
            before, scraped, after = _nvml_readings(), _scraped(*where), _nvml_readings()
            if planted:
                _plant_wrong_rows(scraped, list(before))
            rounds.append({"before": before, "scraped": scraped, "after": after})
    return {"rounds": rounds}


def _served_at(server: subprocess.Popen[str]) -> tuple[str, int]:
    """Wait until the exporter reports its address."""
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := _SERVED_AT.search(line):
            return found[1], int(found[2])
    raise MusterError("muster exporter does not start", why="".join(lines)[-1000:])


def _scraped(host: str, port: int) -> Readings:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise NotHere(
            "prometheus_client is not installed: pip install 'torchmuster[watch]'"
        ) from error

    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_WITHIN_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    names = {metric.name: name for name, (metric, _) in _EXPORTED.items()}
    found: Readings = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                of_gpu = found.setdefault(sample.labels["gpu_uuid"], {})
                of_gpu[names[sample.name]] = sample.value
    return found


def _nvml_readings() -> Readings:
    """Read NVML without Muster's own reader."""
    pynvml.nvmlInit()
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        return {pynvml.nvmlDeviceGetUUID(one): dict(_nvml_values(one)) for one in handles}
    except pynvml.NVMLError as error:
        raise MusterError("NVML cannot be read", why=str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def _nvml_values(handle: Any) -> Iterator[tuple[str, float]]:
    """Yield what this GPU and driver report."""
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
        yield "used_bytes", memory.used
        yield "usable_bytes", memory.total - memory.reserved
    with contextlib.suppress(pynvml.NVMLError):
        yield (
            "temperature_c",
            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        )
    with contextlib.suppress(pynvml.NVMLError):
        yield "power_limit_w", pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    with contextlib.suppress(pynvml.NVMLError):
        yield "utilization", pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(pynvml.NVMLError):
        yield "energy_j", pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


def _plant_wrong_rows(scraped: Readings, uuids: Sequence[str]) -> None:
    """Swap the rows of two GPUs, which their energy counters tell apart; else double the memory of one."""
    a, *others = uuids
    if others and "energy_j" in scraped[a] and "energy_j" in scraped[others[0]]:
        scraped[a], scraped[others[0]] = scraped[others[0]], scraped[a]
    else:
        scraped[a]["usable_bytes"] *= 2


def judge_exporter(facts: Facts) -> Outcome:
    """Each value of the exporter lies between the two readings of NVML around it, in one of the rounds."""
    wrong = set.intersection(*(set(_outside(one)) for one in facts["rounds"]))
    last = facts["rounds"][-1]
    count = sum(len(values) for values in last["before"].values())
    shown = [
        f"{uuid}: {name} {last['scraped'].get(uuid, {}).get(name)}, "
        f"NVML {last['before'][uuid][name]} to {last['after'].get(uuid, {}).get(name)}"
        for uuid, name in wrong
    ]
    good = f"{count} values of {len(last['before'])} GPUs agree with NVML"
    return Outcome(
        confirmed=count > 0 and not wrong,
        says=_first_of(shown) if shown else good if count else "NVML reports no value",
        figures={"values": count, "wrong": len(wrong)},
    )


def _outside(one: Mapping[str, Readings]) -> Iterator[tuple[str, str]]:
    for uuid, values in one["before"].items():
        for name, value in values.items():
            after = one["after"].get(uuid, {}).get(name, value)
            scraped = one["scraped"].get(uuid, {}).get(name)
            tolerance = _EXPORTED[name][1]
            low, high = min(value, after) - tolerance, max(value, after) + tolerance
            if scraped is None or not low <= scraped <= high:
                yield uuid, name


# ---- allocator

_NEAR_RESERVED = 0.05  # relative


def _allocator_check(place: Place, planted: bool) -> Facts:
    name, value = ALLOCATOR_SETTING
    environment = {name: "expandable_segments:False" if planted else value}
    return place.on_ranks("allocator", "train", planted=planted, ranks=1, environment=environment)[
        0
    ]


def judge_allocator(facts: Facts) -> Outcome:
    """Expandable segments are on, and the planner's simulation reserves what torch's allocator did."""
    expandable = facts["expandable_segments"] is True
    simulated = replayed_peak(facts["history"]) + facts["reserved_before"]
    reserved = facts["max_reserved"]
    off = abs(simulated - reserved) / max(reserved, 1)
    state = "on" if expandable else "off"
    return Outcome(
        confirmed=expandable and bool(facts["history"]) and off <= _NEAR_RESERVED,
        says=f"expandable segments are {state}; reserved {format_bytes(reserved)}, "
        f"simulated {format_bytes(simulated)} ({100 * off:.1f} % off)",
        figures={
            "expandable_segments": expandable,
            "reserved_bytes": reserved,
            "simulated_bytes": simulated,
            "allocations": len(facts["history"]),
        },
    )


def replayed_peak(history: Sequence[Sequence[Any]]) -> int:
    """Return the peak that the simulated allocator reserves for recorded actions: action, address, size, stream."""
    allocator = CachingAllocator("expandable")
    numbers: dict[int, int] = {}  # by address
    for number, (action, address, size, stream) in enumerate(history):
        if action == "alloc":
            numbers[address] = number
            allocator.take(number, size, str(stream))
        elif action == "free_completed" and address in numbers:
            allocator.give(numbers.pop(address))
    return allocator.peak_reserved_bytes


# ---- doctor

# No host has this interface; `muster doctor` reports it as a failure.
_NO_INTERFACE = "muster-none0"


def _doctor(place: Place, planted: bool) -> Facts:
    environment = {**os.environ}
    if planted:
        environment["GLOO_SOCKET_IFNAME"] = _NO_INTERFACE
    text = place.muster("doctor", "--deep", "--json", environment=environment, accepted=(0, 1))
    found = json.loads(text)
    return {
        "subjects": list(found["subjects"]),
        "findings": [
            {"name": one["name"], "status": one["status"], "what": one["what"]}
            for one in found["findings"]
            if one["status"] != Status.OK.value
        ],
    }


def judge_doctor(facts: Facts) -> Outcome:
    """The doctor finds no failure on a host that works."""
    by_status: dict[str, list[str]] = {}
    for one in facts["findings"]:
        by_status.setdefault(one["status"], []).append(one["name"])
    failures = [one for one in facts["findings"] if one["status"] == Status.FAILURE.value]
    others = "; ".join(
        f"{status}: {', '.join(names)}"
        for status, names in by_status.items()
        if status != Status.FAILURE.value
    )
    failed = _first_of([f"{one['name']}: {one['what']}" for one in failures])
    good = f"{len(facts['subjects'])} parts of the host checked, no failure" + (
        f"; {others}" if others else ""
    )
    return Outcome(
        confirmed=bool(facts["subjects"]) and not failures,
        says=failed or good,
        figures={
            "subjects": len(facts["subjects"]),
            **{f"{status}s": len(names) for status, names in by_status.items()},
        },
    )


# ---- error-texts


@dataclass(frozen=True, kw_only=True)
class _Mistake:
    """A mistake of a script, and the rule of the known errors that must explain it."""

    work: str
    rule: str
    ranks: int = 1
    on_gpus: bool = True


_MISTAKES = (
    _Mistake(work="no-interface", rule="gloo-no-interface", ranks=2, on_gpus=False),
    _Mistake(work="killed", rule="killed-sigkill", ranks=2, on_gpus=False),
    _Mistake(work="label-out-of-range", rule="device-side-assert"),
    _Mistake(work="out-of-memory", rule="gpu-out-of-memory"),
    _Mistake(work="same-gpu", rule="duplicate-gpu", ranks=2),
)


def _error_texts(place: Place, planted: bool) -> Facts:
    cases: list[Facts] = []
    for mistake in _MISTAKES:
        if mistake.on_gpus and ("nvml" not in place.has or place.device != "gpu"):
            continue
        if mistake.on_gpus and mistake.ranks > place.ranks:
            continue
        expected = "disk-full" if planted and not cases else mistake.rule
        cases.append({"work": mistake.work, "expected": expected, **_explained(place, mistake)})
    return {"cases": cases}


def _explained(place: Place, mistake: _Mistake) -> Facts:
    """Run ranks that fail, and return what ``muster explain`` finds and the rules that match its text."""
    runs = place.scratch()
    devices = ("--num-gpus", str(mistake.ranks)) if mistake.on_gpus else ("--device", "cpu")
    ranks = () if mistake.on_gpus else ("--ranks", str(mistake.ranks))
    program = ("-m", "torchmuster.selftest.probes.mistakes", mistake.work)
    place.muster("run", *devices, *ranks, "--runs", str(runs), *program, accepted=(1,))
    report = json.loads(place.muster("explain", "--runs", str(runs), "--json"))
    first = report["findings"][0]
    text = "\n".join((first["what"], first["evidence"]))
    return {
        "finding": first["name"],
        "rules": [one.name for one in explain_text(text)],
        "error": _last_line(text),
    }


def _last_line(text: str) -> str:
    """Return the last line of an error, which is not the path of its log."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("log: ")]
    return lines[-1][-_MOST_TEXT:] if lines else ""


def judge_error_texts(facts: Facts) -> Outcome:
    """The first rule that matches the error of a run is the expected one."""
    wrong = [
        f"{case['work']}: {next(iter(case['rules']), 'no rule')}, expected {case['expected']}; "
        f"the error: {case['error']}"
        for case in facts["cases"]
        if case["rules"][:1] != [case["expected"]]
    ]
    named = ", ".join(case["expected"] for case in facts["cases"])
    return Outcome(
        confirmed=bool(facts["cases"]) and not wrong,
        says=_first_of(wrong) if wrong else f"the expected rules explain the errors: {named}",
        figures={"cases": len(facts["cases"]), "wrong": len(wrong)},
    )


CHECKS: tuple[Check, ...] = (
    Check(
        id="inventory",
        question="does Muster list the GPUs and links that nvidia-smi lists?",
        fault="one GPU's memory is reported half as large",
        needs=("nvml",),
        seconds=5,
        measure=_inventory,
        judge=judge_inventory,
    ),
    Check(
        id="uuid-selection",
        question="does torch see exactly the GPU that Muster selects by UUID?",
        fault="each process gets the variables of another GPU (with one GPU: an empty list)",
        needs=("gpu",),
        seconds=20,
        measure=_uuid_selection,
        judge=judge_uuid_selection,
    ),
    Check(
        id="cuda-started",
        question="does Muster see whether the CUDA driver has started in a process?",
        fault="the first value is read after CUDA's start",
        needs=("gpu", "nvml"),
        seconds=8,
        measure=_cuda_started,
        judge=judge_cuda_started,
    ),
    Check(
        id="idle-process",
        question="is a process not idle while its kernel runs and its host code sleeps?",
        fault="the process runs no kernel",
        needs=("gpu", "nvml"),
        seconds=15,
        measure=_idle_process,
        judge=judge_idle_process,
    ),
    Check(
        id="claims",
        question="is a claimed GPU refused to another user, and a free one not?",
        fault="the second user looks for claims in another folder",
        needs=("nvml",),
        seconds=5,
        measure=_claims,
        judge=judge_claims,
    ),
    Check(
        id="exporter",
        question="does the exporter serve the values that NVML reports?",
        fault="the rows of two GPUs are swapped (one GPU: its memory is doubled)",
        needs=("nvml",),
        seconds=5,
        measure=_exporter,
        judge=judge_exporter,
    ),
    Check(
        id="allocator",
        question="does torch's allocator use expandable segments, and reserve what the planner simulates?",
        fault="the allocator's variable turns expandable segments off",
        needs=("gpu", "nvml"),
        seconds=20,
        measure=_allocator_check,
        judge=judge_allocator,
    ),
    Check(
        id="doctor",
        question="does the doctor find no failure on this host?",
        fault="a variable names a network interface that does not exist",
        needs=(),
        seconds=20,
        measure=_doctor,
        judge=judge_doctor,
    ),
    Check(
        id="error-texts",
        question="does Muster explain the errors of real ranks by the right rules?",
        fault="another rule is expected for the first error",
        needs=(),
        seconds=60,
        measure=_error_texts,
        judge=judge_error_texts,
    ),
)
