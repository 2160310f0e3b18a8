"""Machines with 8 GPUs and 8 ranks each that do not exist, told of by the exporter's own code, with values that change."""

import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, Ecc, Node
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records
from torchmuster.monitor import catalogue
from torchmuster.monitor.collecting import collector
from torchmuster.monitor.collecting.collector import HostMetrics
from torchmuster.monitor.collecting.run_metrics import RunMetrics
from torchmuster.monitor.metric import Sample, exposition
from torchmuster.monitor.serving import Access, Served, serving
from torchmuster.runfolder import RunFolder, create_run_folder, write_atomically

PER_NODE = 8
_OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class SimulatedNode:
    """One machine of a run; the first one speaks for the run as well."""

    def __init__(self, number: int, run: RunFolder, place: Path) -> None:
        self._name = f"node{number:05d}"
        self._run, self._first = run, number * PER_NODE
        self._random = random.Random(number)
        self._host = HostMetrics(self._name, place)
        self._of_run = RunMetrics(run, "simulated") if number == 0 else None
        self._steps = itertools.count(1)

    def samples(self) -> list[Sample]:
        """Return what its exporter would tell now; everything that can change has changed."""
        labels = ("simulated", self._run.id)
        step = next(self._steps)
        found = [*self._host.samples(), *collector.device_samples(self._devices())]
        if self._of_run is not None:
            _add_line(self._run, step, self._random)
            found += self._of_run.samples(time.time())
        ranks = node_records.NodeRanks(
            host=self._name,
            attempt=0,
            at_unix_s=time.time(),
            ranks=tuple(self._heartbeat(self._first + place, step) for place in range(PER_NODE)),
        )
        if self._of_run is not None:
            found += collector.rank_number([ranks], labels)
        found += collector.rank_samples([ranks], labels)
        took_s = 0.004 + self._random.random() / 1000
        found.append(Sample(catalogue.EXPORTER_TIME, (self._name,), took_s))
        found.append(Sample(catalogue.EXPORTER_SERIES, (self._name,), float(len(found))))
        return found

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the text that Prometheus gets."""
        return exposition(self.samples(), accept)

    def openmetrics(self, at_unix_s: float) -> Iterator[bytes]:
        """Yield the lines of an answer, with the time at which it was given."""
        text, _ = self.answer(_OPENMETRICS)
        for line in text.splitlines():
            if line.startswith(b"#"):
                if line != b"# EOF":
                    yield line + b"\n"
            else:
                yield line + f" {at_unix_s:.3f}\n".encode()

    def _devices(self) -> Node:
        draw = self._random
        gpus = tuple(
            Device(
                kind=DeviceKind.CUDA,
                index=index,
                uuid=f"GPU-{self._first + index:08x}-0000-4000-8000-000000000000",
                name="simulated",
                total_bytes=80 * 2**30,
                used_bytes=70 * 2**30 + draw.randrange(1000) * 2**21,
                reserved_bytes=2**29,
                utilization_percent=draw.randint(80, 100),
                temperature_c=draw.randint(60, 75),
                slowdown_temperature_c=90,
                power_w=draw.uniform(300, 400),
                power_limit_w=400.0,
                ecc=Ecc(enabled=True, corrected=0, uncorrected=0),
            )
            for index in range(PER_NODE)
        )
        cpu = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="cpu")
        return Node(hostname=self._name, taken_unix_s=time.time(), accelerators=gpus, cpu=cpu)

    def _heartbeat(self, rank: int, step: int) -> Heartbeat:
        draw = self._random
        return Heartbeat(
            rank=rank,
            pid=rank,
            beat=step,
            moves=step,
            step=step,
            busy=draw.uniform(0.9, 1.1),
            memory_bytes=10**10 + draw.randrange(10**6) * 4096,
            data_share=draw.random() / 10,
            communication_share=draw.random() / 5,
        )


def _add_line(run: RunFolder, step: int, draw: random.Random) -> None:
    line = {
        "step": step,
        "epoch": 0,
        "loss": 2 + draw.random(),
        "learning_rate": 1e-4,
        "gradient_norm": draw.random(),
        "samples_per_s": 1000 * draw.random(),
        "tokens_per_s": 1e6 * draw.random(),
        "step_s": 1 + draw.random(),
        "data_share": draw.random() / 10,
        "compute_share": 0.7 + draw.random() / 10,
        "communication_share": draw.random() / 10,
        "checkpoint_share": draw.random() / 100,
        "evaluation_share": 0.0,
        "skipped_steps": 0,
        "memory_peak_bytes": 7 * 10**10,
        "flop_s": 1e15 * draw.random(),
        "mfu": 0.4 + draw.random() / 10,
        "loss_scale": 65536.0,
    }
    with (run.metrics / "steps.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


@contextmanager
def simulated_run() -> Iterator[RunFolder]:
    """Give the folder of a run that seems to be under way."""
    with tempfile.TemporaryDirectory(prefix="prometheus-size-") as folder:
        run = create_run_folder(Path(folder) / "runs", "simulated")
        now = time.time()
        state = {"phase": "running", "since_unix_s": now, "started_unix_s": now}
        write_atomically(run.state, json.dumps(state))
        (run.metrics / "saves.jsonl").write_text(
            json.dumps({"at_unix_s": now, "step": 1, "stall_s": 0.1, "problem": ""}) + "\n"
        )
        yield run


@contextmanager
def served(nodes: int) -> Iterator[list[int]]:
    """Serve so many machines, each on a port of its own, as exporters do; gives the ports."""
    with simulated_run() as run, ExitStack() as stack:
        answers: list[Callable[[str], tuple[bytes, str]]] = [
            SimulatedNode(number, run, run.path).answer for number in range(nodes)
        ]
        yield [
            stack.enter_context(serving(Access(), {"/metrics": Served(answer=answer)}))
            for answer in answers
        ]
