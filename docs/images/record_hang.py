"""Records hang.svg: a real run of two ranks on this host, of which one never comes to a collective.

    python docs/images/record_hang.py

Runs ``muster run`` in an empty folder, keeps each line with the seconds since the start, and stops the run when the hang was reported.
Paths of this machine are shortened; nothing else is changed.
"""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).resolve().parent

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

WIDTH = 120
SCRIPT = """\
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("training", flush=True)
loss = torch.ones(1)
for step in range(100):
    dist.all_reduce(loss)
    if step == 30 and dist.get_rank() == 1:
        time.sleep(3600)  # the bug
    time.sleep(0.02)
"""
COMMAND = ("muster", "run", "--device", "cpu", "--ranks", "2", "train.py")


def record() -> list[tuple[float, str]]:
    """Return the lines of the run, each with its seconds, up to the one that says where the stacks are."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT, encoding="utf-8")
        begun, lines = time.monotonic(), []
        program = [sys.executable, "-m", "torchmuster", *COMMAND[1:]]
        with subprocess.Popen(
            program, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                lines.append((time.monotonic() - begun, line.rstrip().replace(folder, ".")))
                if "stacks" in line:
                    os.kill(run.pid, signal.SIGINT)
                    break
            run.stdout.read()
    return lines


def draw(lines: list[tuple[float, str]]) -> str:
    """Return the recording as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {' '.join(COMMAND)}", style="bold"))
    for seconds, line in lines:
        text = Text(f"{seconds:5.1f} s  ", style="dim")
        style = (
            "yellow" if line.startswith("warning") else "red" if line.startswith("failure") else ""
        )
        text.append(re.sub(r"\s+$", "", line), style=style)
        console.print(text)
    return console.export_svg(title="", theme=THEME, code_format=FRAME, unique_id="hang")


if __name__ == "__main__":
    (HERE / "hang.svg").write_text(draw(record()), encoding="utf-8")
