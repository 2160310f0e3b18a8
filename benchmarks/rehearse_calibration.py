"""Compare the start time that a rehearsal predicts with real starts on 2 to 12 hosts in network namespaces (needs root).

``PYTHONPATH=tests python benchmarks/rehearse_calibration.py`` writes docs/measured/rehearsal.md. All hosts share the cores of this machine.
"""

import os
import statistics
import sys
import time
from pathlib import Path

from hosts.lab import Lab
from hosts.launching import PATIENT, Transcript, muster_run
from torchmuster.rehearse.failures import GPU_HOURS_PER_FAILURE
from torchmuster.rehearse.rehearsal import (
    Rehearsal,
    RehearsalRequest,
    measure_control_plane,
    measure_host_start,
)

ROOT = Path(__file__).resolve().parents[1]
SIZES = (2, 4, 8, 12)
ROUNDS = 5
SCRIPT = "import time, torch\nprint(time.time(), flush=True)\n"
PAGE = ROOT / "docs" / "measured" / "rehearsal.md"


def real_start(lab: Lab, size: int) -> float:
    """Return the time from the command to the first line of the last rank."""
    folder = lab.folder / f"start-{time.monotonic_ns()}"
    folder.mkdir()
    (folder / "first_line.py").write_text(SCRIPT)
    names = [host.name for host in lab.hosts[:size]]
    began = time.time()
    words = ["--hosts", ",".join(names), "--device", "cpu", "--ranks", "1", *PATIENT]
    transcript = Transcript(muster_run(lab.hosts[0], [*words, "first_line.py"], folder))
    transcript.process.wait()
    logs = sorted(folder.glob("runs/*/logs/rank-*.log"))
    if len(logs) != size:
        raise RuntimeError("\n".join(line.text for line in transcript.lines))
    return max(float(log.read_text().split()[0]) for log in logs) - began


def predicted_start(size: int) -> float:
    """Return what a rehearsal on this machine predicts, from measurements made now."""
    request = RehearsalRequest(hosts=size, gpu_hours_per_failure=GPU_HOURS_PER_FAILURE)
    rehearsal = Rehearsal(
        request=request,
        control=measure_control_plane(size, quiet_s=0.0, chatty_s=0.0),
        host=measure_host_start(),
        saving=None,
        failures=None,
    )
    return rehearsal.start_on_one_machine_s(os.cpu_count() or 1)


def main() -> None:
    """Measure in turn, and write the page."""
    real: dict[int, list[float]] = {size: [] for size in SIZES}
    predicted: dict[int, list[float]] = {size: [] for size in SIZES}
    with Lab(max(SIZES)) as lab:
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS):
            for size in SIZES:
                predicted[size].append(predicted_start(size))
                real[size].append(real_start(lab, size))
                print(size, predicted[size][-1], real[size][-1], flush=True)
    lines = [
        "# Measured: predicted and real start times",
        "",
        f"Written by `benchmarks/rehearse_calibration.py`: hosts in network namespaces that share {os.cpu_count()} cores, one rank each, over ssh. "
        f"Medians of {len(real[SIZES[0]])} runs, prediction and real start in turn. The prediction is measured anew each time: the launcher with "
        "simulated hosts, and one real host.",
        "",
        "| hosts | predicted | real | difference |",
        "|---:|---:|---:|---:|",
    ]
    for size in SIZES:
        expected, found = statistics.median(predicted[size]), statistics.median(real[size])
        lines.append(f"| {size} | {expected:.1f} s | {found:.1f} s | {expected / found - 1:+.0%} |")
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
