"""Resources of a Prometheus for 10,000 hosts: computed from one host, and measured with 200 simulated ones.

    python benchmarks/prometheus_size.py --out docs/measured/prometheus-size.md          about 12 minutes
    python benchmarks/prometheus_size.py --nodes 10 --seconds 40 --hours 0.1            a try

Each host has 8 GPUs and 8 ranks of one run; the exporter's own code serves them (``simulated_nodes.py``). The bytes of a sample on disk are
measured on a block of two hours, which ``promtool`` makes from as many scrapes.
"""

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from simulated_nodes import PER_NODE, SimulatedNode, served, simulated_run

from torchmuster.monitor.metric import Scope

FLEET = 10_000
# What Prometheus adds for each target: up, scrape_duration_seconds and three more.
_OWN_SERIES = 5
_DAY_S = 86_400
_WHOSE = {"host": "the host", "device": "its GPUs", "rank": "its ranks"}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Series of one machine's answer, by what they are about, and of the run."""

    by_scope: dict[str, int]
    run: int
    answer_bytes: int

    @property
    def machine(self) -> int:
        """Series of a machine that does not speak for the run."""
        return sum(self.by_scope.values())


def count() -> Counted:
    """Count the series in the answers of two machines, of which the first speaks for the run."""
    with simulated_run() as run:
        first, other = (SimulatedNode(number, run, run.path) for number in (0, 1))
        by_scope: dict[str, int] = {}
        for sample in other.samples():
            name = sample.metric.scope.name.lower()
            by_scope[name] = by_scope.get(name, 0) + 1
        of_run = sum(one.metric.scope is Scope.RUN for one in first.samples())
        size = len(other.answer("")[0])
    return Counted(by_scope=by_scope, run=of_run, answer_bytes=size)


def predicted_series(counted: Counted, nodes: int) -> int:
    """Return how many series Prometheus has for so many machines of one run."""
    return nodes * (counted.machine + _OWN_SERIES) + counted.run


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of the database."""

    size_bytes: int
    samples: int

    @property
    def bytes_per_sample(self) -> float:
        """With its index."""
        return self.size_bytes / self.samples


def block_of(hours: float, nodes: int, interval_s: float) -> Block:
    """Have promtool make a block from the answers of some hours."""
    with tempfile.TemporaryDirectory(prefix="prometheus-block-") as folder:
        text, data = Path(folder) / "answers.txt", Path(folder) / "data"
        begin = 7200 * (int(time.time()) // 7200 - 12)  # blocks begin at whole hours
        with simulated_run() as run, text.open("wb") as stream:
            machines = [SimulatedNode(number + 1, run, run.path) for number in range(nodes)]
            for scrape in range(int(hours * 3600 / interval_s)):
                for machine in machines:
                    stream.writelines(machine.openmetrics(begin + scrape * interval_s))
            stream.write(b"# EOF\n")
        subprocess.run(
            ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(data)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return _measured(data)


def _measured(data: Path) -> Block:
    samples = size = 0
    for meta in data.glob("*/meta.json"):
        samples += json.loads(meta.read_text())["stats"]["numSamples"]
        size += sum(path.stat().st_size for path in meta.parent.rglob("*") if path.is_file())
    return Block(size_bytes=size, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a Prometheus says of itself after some minutes."""

    series: int
    samples_per_s: float
    scrape_s: float
    slowest_s: float
    resident_bytes: int
    heap_bytes: int
    snapshot: Block
    processor: float  # cores that it kept busy
    failed: int


def live(nodes: int, seconds: float, interval_s: float) -> Live:
    """Run a Prometheus that asks simulated machines, in a process of theirs."""
    with _machines(nodes) as ports, tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        config = {
            "global": {"scrape_interval": f"{interval_s:g}s"},
            "scrape_configs": [
                {
                    "job_name": "torchmuster",
                    "honor_labels": True,
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
                }
            ],
        }
        path = Path(folder) / "prometheus.yml"
        path.write_text(json.dumps(config))
        with _prometheus(path, Path(folder) / "data") as (server, process):
            time.sleep(min(20.0, seconds / 4) + interval_s)  # all have been asked once
            begun, appended = time.monotonic(), _own(server)["samples"]
            used_s = _used_s(process)
            while time.monotonic() < begun + seconds:
                time.sleep(1)
            lasted_s = time.monotonic() - begun
            now = _own(server)
            durations = [
                float(one["value"][1]) for one in _query(server, "scrape_duration_seconds")
            ]
            failed = len(_query(server, "up == 0"))
            snapshot = _ask(f"{server}/api/v1/admin/tsdb/snapshot", method="POST")
            name = json.loads(snapshot)["data"]["name"]
            return Live(
                series=int(now["series"]),
                samples_per_s=(now["samples"] - appended) / lasted_s,
                scrape_s=statistics.median(durations),
                slowest_s=max(durations),
                resident_bytes=int(now["resident"]),
                heap_bytes=int(now["heap"]),
                snapshot=_measured(Path(folder) / "data" / "snapshots" / name),
                processor=(_used_s(process) - used_s) / lasted_s,
                failed=failed,
            )


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def _machines(nodes: int) -> Iterator[list[int]]:
    """Serve in another process, so that asking and answering do not wait for each other's Python."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(nodes, theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join()


def _serve(nodes: int, told: Connection) -> None:
    with served(nodes) as ports:
        told.send(ports)
        told.recv()


@contextmanager
def _prometheus(config: Path, data: Path) -> Iterator[tuple[str, psutil.Process]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen([*command, "--web.enable-admin-api"], stdout=subprocess.DEVNULL)
    server = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                _ask(f"{server}/-/ready")
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield server, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _own(server: str) -> dict[str, float]:
    """Return what Prometheus measures of itself."""
    text = _ask(f"{server}/metrics")
    wanted = {
        "series": "prometheus_tsdb_head_series",
        "samples": r"prometheus_tsdb_head_samples_appended_total(?:\{type=\"float\"\})?",
        "resident": "process_resident_memory_bytes",
        "heap": "go_memstats_heap_inuse_bytes",
    }
    found = {}
    for name, pattern in wanted.items():
        match = re.search(rf"^{pattern} (\S+)$", text, re.MULTILINE)
        assert match is not None, pattern
        found[name] = float(match[1])
    return found


def _query(server: str, expression: str) -> list[dict[str, list[str]]]:
    words = urllib.parse.urlencode({"query": expression})
    return list(json.loads(_ask(f"{server}/api/v1/query?{words}"))["data"]["result"])


def _ask(address: str, method: str = "GET") -> str:
    request = urllib.request.Request(address, method=method)  # noqa: S310 -- on this machine
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return str(answer.read().decode())


def main() -> None:
    """Count, compute, measure, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--interval", type=float, default=10.0, help="between two questions")
    parser.add_argument("--hours", type=float, default=2.0, help="that the block covers")
    parser.add_argument("--block-nodes", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counted = count()
    print(counted, flush=True)
    block = block_of(options.hours, options.block_nodes, options.interval)
    print(block, f"{block.bytes_per_sample:.2f} bytes a sample", flush=True)
    seen = live(options.nodes, options.seconds, options.interval)
    print(seen, flush=True)
    text = page(counted, block, seen, options)
    print(text)
    if options.out:
        options.out.write_text(text)


def page(counted: Counted, block: Block, seen: Live, options: argparse.Namespace) -> str:
    """Return what was found, as a page."""
    nodes, every_s = options.nodes, options.interval
    series = predicted_series(counted, nodes)
    rate = series / every_s
    fleet = predicted_series(counted, FLEET)
    each = ", ".join(f"{number} of {_WHOSE[name]}" for name, number in counted.by_scope.items())
    rows = [
        f"| {each_s} s | {fleet / each_s:,.0f} | {fleet / each_s * _DAY_S * block.bytes_per_sample / 1e9:,.0f} GB |"
        for each_s in (10, 15, 30, 60)
    ]
    per_series = seen.resident_bytes / seen.series
    return f"""\
# Prometheus for {FLEET:,} hosts: computed and measured

A host with {PER_NODE} GPUs and {PER_NODE} ranks has **{counted.machine} series** ({each}), in a scrape of {counted.answer_bytes / 1000:.0f} kB. Prometheus adds {_OWN_SERIES} series of its own
for each host. A run has {counted.run} series, which one or two hosts export. With {FLEET:,} hosts in one run, this gives **{fleet:,} series**:

| scrape interval | samples per second | disk space per day |
|---|---|---|
{chr(10).join(rows)}

A sample takes {block.bytes_per_sample:.2f} bytes on disk, including the index. This was measured on a block of {options.hours:g} h with {block.samples:,} samples, in which every value that can change
changes from one scrape to the next.

For comparison, a real Prometheus scraped {nodes} simulated hosts every {every_s:g} s for {options.seconds:.0f} s, all on {os.cpu_count()} cores:

| | computed | measured |
|---|---|---|
| series | {series:,} | {seen.series:,} ({_apart(seen.series, series)}) |
| samples per second | {rate:,.0f} | {seen.samples_per_s:,.0f} ({_apart(seen.samples_per_s, rate)}) |
| bytes per sample | {block.bytes_per_sample:.2f} (block of {options.hours:g} h) | {seen.snapshot.bytes_per_sample:.2f} (block of {options.seconds / 60:.0f} min, in which the index takes a larger share) |
| duration of a scrape | | {1000 * seen.scrape_s:.0f} ms (median), {1000 * seen.slowest_s:.0f} ms (longest of the last round) |
| memory of Prometheus | | {seen.resident_bytes / 2**20:,.0f} MiB resident, {seen.heap_bytes / 2**20:,.0f} MiB heap: {per_series / 1000:.1f} kB per series |
| CPU cores used | | {seen.processor:.2f} |
| failed targets | | {seen.failed} |

Written by `python benchmarks/prometheus_size.py`, Prometheus {_version()}.
"""


def _apart(measured: float, computed: float) -> str:
    return f"{(measured / computed - 1) * 100:+.1f} %"


def _version() -> str:
    said = subprocess.run(["prometheus", "--version"], capture_output=True, text=True)
    found = re.search(r"version (\d+\.\d+\.\d+)", said.stdout + said.stderr)
    return found[1] if found else "?"


if __name__ == "__main__":
    sys.exit(main())
