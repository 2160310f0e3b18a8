"""Write what rank 0 recorded of a script to the run folder, in the files that ``muster train`` writes itself."""

import contextlib
import json

import msgspec

from torchmuster import untrusted
from torchmuster.runfolder import RunFolder, write_atomically

_FILES = ("steps", "evaluations", "saves")
_LONGEST_NAME = 200
_decode = msgspec.json.Decoder(dict[str, float | int | str | bool | None]).decode


class ScriptMetrics:
    """The metrics files of one run of a script."""

    def __init__(self, run: RunFolder) -> None:
        self._folder = run.metrics
        self._attempt = 0

    def add(self, attempt: int, text: str) -> None:
        """Append the lines of a text, each with the ``file`` that it belongs to; if a restarted script repeats steps, their new lines replace the old ones.

        A full disk must not stop the run: lines that cannot be written are lost.
        """
        texts: dict[str, str] = {}
        for recorded in text.splitlines():
            try:
                line = _decode(recorded)
            except (msgspec.DecodeError, UnicodeError):
                continue
            file, step = line.get("file"), line.get("step")
            if file not in _FILES or not isinstance(step, int):
                continue
            if attempt > self._attempt and file == "steps":
                self._attempt = attempt
                self._cut_off_from(step)
            content = {}
            for name, value in line.items():
                if name != "file" and len(name) <= _LONGEST_NAME:
                    content[name] = value
            texts[file] = texts.get(file, "") + json.dumps(content) + "\n"
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            for file, text in texts.items():
                with (self._folder / f"{file}.jsonl").open("a", encoding="utf-8") as stream:
                    stream.write(text)

    def _cut_off_from(self, step: int) -> None:
        for file in ("steps", "evaluations"):
            path = self._folder / f"{file}.jsonl"
            with contextlib.suppress(OSError):
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                earlier = [line for line in lines if _step_in(line) < step]
                if len(earlier) < len(lines):
                    write_atomically(path, "".join(earlier))


def _step_in(line: str) -> int:
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        return int(untrusted.parse_json(line)["step"])
    return -1
