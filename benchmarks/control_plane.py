"""The launcher with up to 8,192 simulated hosts: start, traffic, CPU, memory, dead hosts, stop.

``python benchmarks/control_plane.py measure OUT.json [SRC]`` measures (with the source folder of another version, if given);
``python benchmarks/control_plane.py page BEFORE.json AFTER.json`` writes docs/measured/control-plane.md and its pictures.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchmuster.pages.charts import RULES, Axis, Curve, line_chart

ROOT = Path(__file__).resolve().parents[1]
HOSTS = (8, 64, 512, 2048, 8192)
QUIET_S, CHATTY_S = "6", "6"
Row = dict[str, Any]


def measure(out: Path, source: Path) -> None:
    """Measure each number of hosts in new processes."""
    rows: list[Row] = []
    for hosts in HOSTS:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torchmuster.rehearse.control_plane"),
                *(str(hosts), QUIET_S, CHATTY_S),
            ],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        row = json.loads(done.stdout) if done.returncode == 0 else {"hosts": hosts, "failed": True}
        print(row, flush=True)
        rows.append(row)
        out.write_text(json.dumps({"machine": _machine(), "rows": rows}, indent=1) + "\n")


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def page(before: Path, after: Path) -> None:
    """Write the page."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    images = ROOT / "docs" / "images"
    for name, title, key, unit in PICTURES:
        curves = [
            Curve(name=word, points=[(one["hosts"], one[key]) for one in rows if one.get(key)])
            for word, rows in (("before", old["rows"]), ("now", new["rows"]))
        ]
        drawn = line_chart(
            title,
            Axis(title="hosts", log=True),
            Axis(title=title, unit=unit, log=True),
            curves,
        )
        styled = drawn.replace("</title>", f"</title><style>{RULES}</style>", 1)
        (images / f"control-plane-{name}.svg").write_text(styled + "\n")
    text = TEMPLATE.format(
        machine=new["machine"], now=_table(new["rows"]), before=_table(old["rows"])
    )
    (ROOT / "docs" / "measured" / "control-plane.md").write_text(text)


PICTURES = (
    ("bytes", "bytes sent to all hosts", "sent_bytes", "B"),
    ("start", "start of all hosts", "start_s", "s"),
    ("cpu", "cores of the launcher, with heartbeats", "heartbeats_cpu", ""),
)
COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("hosts", lambda row: f"{row['hosts']:,}"),
    ("ranks", lambda row: f"{row['hosts'] * 8:,}"),
    ("start", lambda row: f"{row['start_s']:.1f} s"),
    ("launcher's CPU time", lambda row: f"{row['start_cpu_s']:.1f} s"),
    ("sent", lambda row: f"{row['sent_bytes'] / 1e6:,.1f} MB"),
    ("cores, heartbeats", lambda row: f"{row['heartbeats_cpu']:.3f}"),
    ("cores, a line per rank and second", lambda row: f"{row['chatty_cpu']:.3f}"),
    ("memory", lambda row: f"{row['memory_bytes'] / 2**20:.0f} MiB"),
    ("silent host noticed", lambda row: f"{row['notice_s']:.1f} s"),
    ("all told to stop", lambda row: f"{row['stop_s']:.2f} s"),
)
TEMPLATE = """# Measured: the launcher with simulated hosts

Written by `benchmarks/control_plane.py`. The launcher, its protocol and its Slurm transport are the real ones. Another process takes the place of `srun` and
of the node agents: it connects once for each host, answers every message at once, and sends the heartbeats of 8 ranks per host every 2 s. The times on a real
cluster also contain what the hosts do: start Python, import torch, look at their GPUs.

Machine: {machine}. Both processes share it, so the seconds of the start contain the simulation's own work; CPU time and memory are the launcher's
alone. *Sent* is what all hosts together receive until the end of the run.

## Now

{now}

## Before

With one `srun` that carried all messages, which copies each of them to every host (commit 9adb221d; measured next to other work, so the times are too long, most of
all in the last row):

{before}

![Bytes sent](../images/control-plane-bytes.svg)

![Start](../images/control-plane-start.svg)

![Cores](../images/control-plane-cpu.svg)
"""


def _table(rows: list[Row]) -> str:
    lines = [
        "| " + " | ".join(title for title, _ in COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        if row.get("failed"):
            lines.append(f"| {row['hosts']:,} | failed |" + " |" * (len(COLUMNS) - 2))
        else:
            lines.append("| " + " | ".join(cell(row) for _, cell in COLUMNS) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else ROOT / "src")
    else:
        page(Path(sys.argv[2]), Path(sys.argv[3]))
