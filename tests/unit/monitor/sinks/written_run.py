"""A run's folder in which lines appear as a training writes them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.monitor.sinks.sink import Wanted
from torchmuster.runfolder import RunFolder, create_run_folder, write_atomically

# As the process beside rank 0 does; the libraries of trackers leave threads in their process.
SEND = """
import sys
from pathlib import Path

import msgspec

from torchmuster.monitor.sinks.sending import Sending
from torchmuster.monitor.sinks.sink import Wanted, open_sink
from torchmuster.runfolder import RunFolder

run, sink = RunFolder(Path(sys.argv[1])), sys.argv[2]
wanted = msgspec.json.decode(sys.argv[3], type=Wanted)
sending = Sending(run, sink, lambda known: open_sink(sink, run, wanted, known))
count = sending.send_new(last=True)
sending.close(finished=False)
print("sent", count)
"""


class WrittenRun:
    """Writes lines about steps and evaluations, and cuts them off as a restart does."""

    def __init__(self, folder: Path) -> None:
        self.run: RunFolder = create_run_folder(folder / "runs", "llm")
        self._now = 1_700_000_000.0

    def steps(self, *steps: int, loss: float | None = 2.0, **more: object) -> None:
        for step in steps:
            self._add("steps", {"step": step, "epoch": 0, "loss": loss, "verdict": "", **more})

    def evaluations(self, *steps: int, **numbers: float) -> None:
        for step in steps:
            self._add("evaluations", {"step": step, "epoch": 0, **numbers})

    def _add(self, name: str, line: dict[str, Any]) -> None:
        self._now += 1.0
        with (self.run.metrics / f"{name}.jsonl").open("a") as stream:
            stream.write(json.dumps({**line, "at_unix_s": self._now}) + "\n")

    def send(self, sink: str, wanted: Wanted) -> int:
        """Send what is new and close the sink; return the number of lines."""
        words = [str(self.run.path), sink, msgspec.json.encode(wanted).decode()]
        done = subprocess.run(
            [sys.executable, "-c", SEND, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    def cut_off_after(self, step: int) -> None:
        for path in self.run.metrics.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_atomically(path, "".join(kept))
