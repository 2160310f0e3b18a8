"""A run's folder in which lines appear as a training writes them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchmuster.runfolder import RunFolder, create_run_folder, write_atomically

# In a process of its own: the libraries of trackers leave threads.
SEND = """
import sys
from pathlib import Path

from torchmuster.monitor import sinks
from torchmuster.runfolder import RunFolder

sender = sinks.Sender(RunFolder(Path(sys.argv[1])), sys.argv[2], "llama")
print("sent", sender.send_new())
sender.start()
sender.end(finished=False)
assert sender.wait(60.0) is None
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

    def send(self, tracker: str) -> int:
        """Send what is new and close the tracker; return the number of rows."""
        done = subprocess.run(
            [sys.executable, "-c", SEND, str(self.run.path), tracker],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.partition("sent ")[2].split()[0])

    def cut_off_after(self, step: int) -> None:
        for path in self.run.metrics.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_atomically(path, "".join(kept))
