"""Draws top-*.svg: ``muster top`` on machines that the tests' stand-in for NVIDIA's library plays, with made-up ranks.

python docs/images/draw_top.py
"""

import asyncio
import ctypes
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

import nvml_stub  # noqa: E402
from nvml_stub import scenarios  # noqa: E402
from nvml_stub.scenarios import FIRST_PID, GIB, Scenario  # noqa: E402
from torchmuster.devices.model import Device, DeviceKind, Node  # noqa: E402
from torchmuster.devices.readers import nvml  # noqa: E402
from torchmuster.launch.hangs.heartbeat import Heartbeat  # noqa: E402
from torchmuster.launch.history import node_records  # noqa: E402
from torchmuster.monitor import catalogue  # noqa: E402
from torchmuster.monitor.views.top_app import TopApp  # noqa: E402
from torchmuster.monitor.views.top_picture import HostFigures, TopPicture, TopWatch  # noqa: E402
from torchmuster.runfolder import create_run_folder, write_atomically  # noqa: E402

# Noon wherever it is drawn, so that it is the same everywhere.
NOW = time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))
HOST = "gpu-server"
# Ranks, columns and lines of each picture.
SIZES = {"top-8.svg": (8, 120, 30), "top-64.svg": (64, 200, 50)}
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def machine(ranks: int) -> Scenario:
    """Return a machine with a GPU for each rank; a few of many are not well."""
    scenario = scenarios.sixty_four() if ranks > 8 else scenarios.eight_a100()
    del scenario["devices"][ranks:]
    for number, gpu in enumerate(scenario["devices"]):
        load = 70 + (number * 37) % 30
        used = (58 + number % 9) * GIB
        gpu["processes"] = [scenarios.process(number, used, sm_percent=load)]
        gpu["memory"]["used"] = used
        gpu["utilization"] = {"gpu": load, "memory": load // 2}
        gpu["power_mw"] = 250_000 + 1500 * load
        gpu["temperature_c"] = 55 + number % 8
        gpu["throttle_reasons"] = 0x4 if number % 8 == 1 else 0
    if ranks >= 8:
        scenario["devices"][3] |= {"temperature_c": 88, "throttle_reasons": 0x20}
        scenario["devices"][6]["memory"]["used"] = 78 * GIB
    return scenario


def picture(ranks: int) -> TopPicture:
    """Return what is shown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node = _node(folder, machine(ranks))
        run = create_run_folder(folder / "runs", "synthetic-data")
        state = {"phase": "running", "since_unix_s": NOW - 5000, "started_unix_s": NOW - 5400}
        write_atomically(run.state, json.dumps(state))
        steps = run.metrics / "steps.jsonl"
        steps.write_text(json.dumps(_LINE) + "\n")
        os.utime(steps, (NOW - 1, NOW - 1))
        told = node_records.NodeRanks(
            host=HOST, attempt=0, at_unix_s=NOW, ranks=tuple(map(_heartbeat, range(ranks)))
        )
        place = node_records.node_record_path(run, HOST, 0)
        place.parent.mkdir(parents=True)
        place.write_bytes(msgspec.json.encode(told))
        # As if it had been looked at for a while.
        nodes = iter([*(_earlier(node, look) for look in range(30)), node])
        watch = TopWatch(folder / "runs", lambda: next(nodes))
        seen = [watch.look(NOW - 60 + 2 * look) for look in range(31)]
    return dataclasses.replace(seen[-1], host=_figures())


_LINE = {
    "step": 12_400,
    "epoch": 0,
    "loss": 2.3127,
    "learning_rate": 2.8e-4,
    "gradient_norm": 0.61,
    "samples_per_s": 412.0,
    "tokens_per_s": 843_776.0,
    "step_s": 0.62,
    "mfu": 0.46,
    "memory_peak_bytes": 66 * GIB,
}


def _figures() -> HostFigures:
    values = {
        catalogue.HOST_CPU: 0.31,
        catalogue.HOST_MEMORY: 1008.0 * GIB,
        catalogue.HOST_MEMORY_AVAILABLE: 596.0 * GIB,
        catalogue.HOST_DISK_FREE: 3100.0 * GIB,
    }
    return HostFigures(name=HOST, values=values, received_bytes_s=1.4 * GIB, sent_bytes_s=1.3 * GIB)


def _heartbeat(rank: int) -> Heartbeat:
    phases = ("forward", "backward", "backward", "backward")
    return Heartbeat(
        rank=rank,
        pid=FIRST_PID + rank,
        beat=1,
        moves=1,
        step=12_403,
        phase=phases[rank % len(phases)],
        doing="all_reduce" if rank % 4 else "",
        place="pretrain.py:88 in step",
        data_share=0.37 if rank == 5 else 0.04 + 0.01 * (rank % 4),
        communication_share=0.02 if rank == 3 else 0.27 + 0.01 * (rank % 5),
        busy=1.1 + 0.1 * (rank % 3),
        memory_bytes=(11 + rank % 4) * GIB,
    )


def _node(folder: Path, scenario: Scenario) -> Node:
    library = nvml_stub.build(folder)
    ctypes.CDLL(str(library / nvml_stub.LIBRARY), mode=ctypes.RTLD_GLOBAL)
    path = nvml_stub.write(folder / "scenario.json", scenario)
    before = os.environ.get(nvml_stub.SCENARIO_VARIABLE)
    os.environ[nvml_stub.SCENARIO_VARIABLE] = str(path)
    seen = nvml.read_nvml()
    if before is None:
        del os.environ[nvml_stub.SCENARIO_VARIABLE]
    else:
        os.environ[nvml_stub.SCENARIO_VARIABLE] = before
    return Node(
        hostname=HOST,
        taken_unix_s=NOW,
        accelerators=seen.devices,
        cpu=Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="CPU"),
        driver_version=seen.driver_version,
        cuda_version=seen.cuda_version,
    )


def _earlier(node: Node, look: int) -> Node:
    """Return the machine as it may have been: every GPU as busy as now, now and then less."""
    devices = tuple(
        dataclasses.replace(
            one,
            utilization_percent=max(
                0, (one.utilization_percent or 0) - (look * 29 + one.index * 7) % 31
            ),
        )
        for one in node.accelerators
    )
    return dataclasses.replace(node, accelerators=devices)


def draw(shown: TopPicture, columns: int, lines: int) -> str:
    """Return the screen as SVG."""

    async def whole() -> str:
        app = TopApp(shown, lambda: shown, every_s=3600.0)
        async with app.run_test(size=(columns, lines)) as pilot:
            while "reverse" not in (drawn := app.export_screenshot(title="muster top")):
                await pilot.pause()  # the keys at the foot come last
            return drawn

    # The toolkit's own frame fetches a font from the web; a picture in a document must not.
    drawn = _FONTS.sub("", asyncio.run(whole()))
    return drawn.replace("Fira Code, monospace", '"DejaVu Sans Mono", Menlo, Consolas, monospace')


def draw_all() -> dict[str, str]:
    """Return every picture of the documents by its name."""
    return {
        name: draw(picture(ranks), columns, lines)
        for name, (ranks, columns, lines) in SIZES.items()
    }


if __name__ == "__main__":
    for name, drawn in draw_all().items():
        (HERE / name).write_text(drawn, encoding="utf-8")
