"""The table of ``muster gpus``: the devices, and who uses them."""

from collections.abc import Iterator, Mapping

from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import age_s
from torchmuster.devices.request import WORTH_MENTIONING_IDLE_S, Claim, in_use_by
from torchmuster.devices.visibility import Visible
from torchmuster.pages.columns import aligned_columns
from torchmuster.units import GiB, format_seconds, plural

TITLES = ("GPU", "name", "memory", "busy", "temp", "power", "used by")


def table_lines(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> Iterator[str]:
    """Yield the lines: this machine, its devices and their users, and how to use the free ones.

    Lines are as long as the users' commands; a terminal wraps them.
    """
    if not node.accelerators:
        yield f"{node.hostname}  ·  no GPU found; programs run on the CPU"
        return
    free = []
    for device in shown.devices:
        if device.uuid not in claims and not device.trouble and not in_use_by(device):
            free.append(device)
    usable = 0
    for device in node.accelerators:
        usable += device.mig_index is not None or not device.mig_enabled
    facts = [node.hostname, f"{plural(usable, 'GPU')}, {len(free)} free"]
    if node.driver_version:
        facts.append(f"driver {node.driver_version}")
    if node.cuda_version:
        facts.append(f"CUDA up to {node.cuda_version}")
    yield "  ·  ".join(facts)
    rows = [TITLES]
    for device in node.accelerators:
        user = _user(device, shown, claims.get(device.uuid), node.taken_unix_s)
        rows.append((device.number, *_state(device), user))
    yield ""
    yield from aligned_columns(rows)
    yield ""
    if not shown.devices:
        yield f"all GPUs are hidden by {', '.join(sorted(set(shown.hidden_by.values())))}"
    elif not free:
        yield "none free; to wait: muster gpus pick --wait python train.py"
    else:
        whole = [device for device in free if device.mig_index is None]
        pick = f"muster gpus pick --num-gpus {len(whole) or 1} python train.py"
        yield f"{plural(len(free), 'GPU')} free; to use: {pick}"


def _state(device: Device) -> tuple[str, str, str, str, str]:
    """Return name, memory, load, temperature and power; "-" for what the driver does not report."""
    # Without the vendor's prefix; of a MIG slice, the profile.
    name = device.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD ")
    if device.mig_index is not None:
        name = f"└ {name.rpartition(' ')[2]}"
    memory = busy = temperature = power = "-"
    if device.total_bytes is not None:
        memory = f"{device.total_bytes / GiB:.0f} GiB"
        if device.used_bytes is not None:
            memory = f"{device.used_bytes / GiB:.1f} / {memory}"
    if device.utilization_percent is not None:
        busy = f"{device.utilization_percent} %"
    if device.temperature_c is not None:
        temperature = f"{device.temperature_c} °C"
    if device.power_w is not None:
        limit = f" / {device.power_limit_w:.0f}" if device.power_limit_w else ""
        power = f"{device.power_w:.0f}{limit} W"
    return name, memory, busy, temperature, power


def _user(device: Device, shown: Visible, claim: Claim | None, now_unix_s: float) -> str:
    if device.trouble:
        return f"does not answer: {device.trouble}"
    if claim is not None:
        since = format_seconds(max(now_unix_s - claim.since_unix_s, 0))
        return f"{claim.user}  claimed {since}  {claim.command}"
    if device.mig_enabled and device.mig_index is None:
        return "split into MIG slices"
    if device.compute_processes:
        return _main_process(device, now_unix_s)
    hidden_by = shown.hidden_by.get(device.uuid)
    if hidden_by:
        return f"hidden by {hidden_by.partition('=')[0]}"
    return in_use_by(device) or "free"


def _main_process(device: Device, now_unix_s: float) -> str:
    """Return the process with the most memory, and the number of others."""
    processes = device.compute_processes
    main = max(processes, key=lambda process: process.memory_bytes or 0)
    facts = [main.user or f"pid {main.pid}"]
    age = age_s(main, now_unix_s)
    if main.idle_s is not None and main.idle_s >= WORTH_MENTIONING_IDLE_S:
        facts.append(f"idle {format_seconds(main.idle_s)}")
    elif age is not None:
        facts.append(format_seconds(age))
    if len(processes) > 1:
        facts.append(f"+{len(processes) - 1} more")
    return "  ".join([*facts, main.command or ""])
