"""Draws gpus.svg: the screen of ``muster gpus`` on a shared server, by the code that draws it for users.

The GPUs are read from the tests' stand-in for NVIDIA's library; who works on them is written below.

    python docs/images/draw.py
"""

import ctypes
import dataclasses
import io
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

import nvml_stub  # noqa: E402
from nvml_stub import scenarios  # noqa: E402
from torchmuster.cli import gpus_table  # noqa: E402
from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Node  # noqa: E402
from torchmuster.devices.readers import nvml  # noqa: E402
from torchmuster.devices.request import Claim  # noqa: E402
from torchmuster.devices.visibility import visible  # noqa: E402

WIDTH = 118
NOW = 1_800_000_000.0
MINUTE, HOUR = 60.0, 3600.0
# GPU: user, command, running for, idle for
PEOPLE = {
    0: ("alice", "torchrun --nproc-per-node 4 pretrain.py", 26 * HOUR, 0.0),
    1: ("alice", "torchrun --nproc-per-node 4 pretrain.py", 26 * HOUR, 0.0),
    2: ("alice", "torchrun --nproc-per-node 4 pretrain.py", 26 * HOUR, 0.0),
    3: ("alice", "torchrun --nproc-per-node 4 pretrain.py", 26 * HOUR, 0.0),
    4: ("bob", "python finetune.py --lora", 40 * MINUTE, 0.0),
    5: ("chen", "python -m ipykernel_launcher", 9 * HOUR, 3 * HOUR),
}
CLAIMED = {6: ("dana", "python sweep.py", 4 * MINUTE)}

DARK = [(60, 64, 72), (224, 108, 117), (139, 195, 106), (229, 192, 103), (97, 175, 239)]
DARK += [(198, 120, 221), (86, 190, 206), (200, 204, 212)]
BRIGHT = [(92, 99, 112), (240, 113, 120), (152, 208, 116), (240, 203, 110), (110, 188, 250)]
BRIGHT += [(210, 135, 235), (100, 205, 220), (255, 255, 255)]
THEME = TerminalTheme((24, 26, 31), (215, 218, 224), DARK, BRIGHT)
# Rich's own frame fetches a font from the web; a picture in a document must not.
FRAME = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect fill="#181a1f" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def _node() -> Node:
    with tempfile.TemporaryDirectory() as name:
        folder = nvml_stub.build(Path(name))
        ctypes.CDLL(str(folder / nvml_stub.LIBRARY), mode=ctypes.RTLD_GLOBAL)
        scenario = nvml_stub.write(folder / "scenario.json", scenarios.eight_a100())
        before = os.environ.get(nvml_stub.SCENARIO_VARIABLE)
        os.environ[nvml_stub.SCENARIO_VARIABLE] = str(scenario)
        seen = nvml.read_nvml()
        if before is None:
            del os.environ[nvml_stub.SCENARIO_VARIABLE]
        else:
            os.environ[nvml_stub.SCENARIO_VARIABLE] = before
    return Node(
        hostname="gpu-server",
        taken_unix_s=NOW,
        accelerators=tuple(_with_people(device) for device in seen.devices),
        cpu=Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="CPU"),
        links=seen.links,
        driver_version=seen.driver_version,
        cuda_version=seen.cuda_version,
    )


def _with_people(device: Device) -> Device:
    if device.index not in PEOPLE:
        return device
    user, command, age, idle = PEOPLE[device.index]
    process = DeviceProcess(
        pid=4000 + device.index,
        compute=True,
        memory_bytes=device.used_bytes,
        user=user,
        command=command,
        started_unix_s=NOW - age,
        idle_s=idle,
    )
    return dataclasses.replace(device, processes=(process,))


def draw() -> str:
    """Return the picture as SVG."""
    node = _node()
    claims = {
        node.accelerators[gpu].uuid: Claim(
            pid=4100, user=user, command=command, since_unix_s=NOW - since
        )
        for gpu, (user, command, since) in CLAIMED.items()
    }
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ muster gpus", style="bold").append("   (synthetic data)", style="dim"))
    shown = visible(node.accelerators, {})
    console.print(gpus_table.screen(node, shown, claims, links=False, uuids=False, width=WIDTH))
    return console.export_svg(title="", theme=THEME, code_format=FRAME, unique_id="gpus")


if __name__ == "__main__":
    (HERE / "gpus.svg").write_text(draw(), encoding="utf-8")
