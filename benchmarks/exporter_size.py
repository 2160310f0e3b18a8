"""How much an exporter serves, how long it takes and what memory it has, by the number of ranks on its machine.

    python benchmarks/exporter_size.py --ranks 8 64 512

Simulated ranks: the files that node agents write, with as many ranks in them. Each number in a process of its own.
"""

import argparse
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from torchmuster.devices.snapshot import take_snapshot
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records
from torchmuster.monitor.collecting.collector import Collector
from torchmuster.monitor.metric import exposition
from torchmuster.runfolder import create_run_folder, write_atomically

_SCRAPES = 21


def measure(ranks: int) -> dict[str, float]:
    """Serve one run of so many ranks several times; return the median time, series, bytes, memory."""
    with tempfile.TemporaryDirectory() as folder:
        run = create_run_folder(Path(folder) / "runs", "simulated")
        now = time.time()
        state = {"phase": "running", "since_unix_s": now, "started_unix_s": now}
        write_atomically(run.state, json.dumps(state))
        heartbeats = tuple(
            Heartbeat(
                rank=rank,
                pid=rank,
                beat=1,
                moves=1,
                step=7,
                busy=1.0,
                memory_bytes=10**9,
                data_share=0.1,
                communication_share=0.2,
            )
            for rank in range(ranks)
        )
        clock = iter(range(int(now), int(now) + 10**6, 2))  # so that each answer is a new one
        collector = Collector(run.path.parent, take_snapshot, clock=lambda: float(next(clock)))
        taken_s, size, series = [], 0, 0
        for _ in range(_SCRAPES):
            content = node_records.NodeRanks(
                host="a", attempt=0, at_unix_s=now + 100, ranks=heartbeats
            )
            path = node_records.node_record_path(run, socket.gethostname(), 0)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(content))
            began = time.perf_counter()
            samples = collector.samples()
            text, _ = exposition(samples, "")
            taken_s.append(time.perf_counter() - began)
            size, series = len(text), len(samples)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "ranks": ranks,
            "series": series,
            "bytes": size,
            "ms": 1000 * statistics.median(taken_s[1:]),
            "memory_mib": peak_bytes / 2**20,
        }


def main() -> None:
    """Measure each number in a fresh process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.ranks[0])))
        return
    print(
        "| ranks | series | answer | time of an answer | memory of the process |\n|---|---|---|---|---|"
    )
    for ranks in options.ranks:
        command = [sys.executable, __file__, "--one", "--ranks", str(ranks)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(
            f"| {ranks} | {found['series']:,} | {found['bytes'] / 1000:,.0f} kB | {found['ms']:.1f} ms | "
            f"{found['memory_mib']:.0f} MiB |"
        )


if __name__ == "__main__":
    main()
