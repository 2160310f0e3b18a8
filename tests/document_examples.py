"""Code in documents is executed: Python blocks as they stand, console blocks with their output.

A console block shows commands after ``$`` and what they print. A comment before it says where it
runs: ``<!-- machine: eight_a100_idle -->``; ``<!-- output: varies -->`` compares only the exit code,
``<!-- output: these lines -->`` only that each line is printed, with … for others (ranks write side by
side, and machines differ) and for parts of a line. What a terminal would show is compared: both streams as they come. In the documents every machine is
called gpu-server, every run was started at noon of 31 January 2026, and every one takes 5 s.

Blocks are independent of each other, except those of README and those of the tutorial: ``ranks/test_new_user.py`` types each of
these two documents into one terminal.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import nvml_stub
from nvml_stub import scenarios
from patience import GIVE_UP_S

BLOCK = re.compile(
    r"(?P<comment>(?:<!--[^\n]*-->\n)*)```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_HOST = re.compile(rf"\b{re.escape(platform.node())}\b")
_RUN = re.compile(r"\b20\d{6}-\d{6}-([a-z0-9-]+?)-[0-9a-f]{4}\b")
_TOOK = re.compile(r"\b(in|after) \d+ (?:s|min \d+ s|min)\b|(?<=  )\d+ s(?=  |, \d+ restart)")
_MACHINE = re.compile(r"machine: (\w+)")
_OF_ALL = re.compile(r"\[all (\d+) ranks\] (.*)")
_HERE_DOCUMENT = re.compile(r"<<'(\w+)'")


class ConsoleParser:
    """Finds console blocks."""

    def __call__(self, document: Document) -> Iterator[Region]:
        for match in BLOCK.finditer(document.text):
            yield Region(match.start(), match.end(), match, _run_console)


def _run_console(example: Example) -> None:
    match = example.parsed
    machine = _MACHINE.search(match["comment"])
    varies = "output: varies" in match["comment"]
    these_lines = "output: these lines" in match["comment"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = surroundings(folder, machine[1] if machine else "no_gpus")
        for command, expected in steps(match["body"]):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=GIVE_UP_S,
            )
            printed = as_documented(done.stdout, folder)
            if varies:
                assert done.returncode == 0, f"$ {command}\n{printed}"
            elif these_lines:
                missing = lines_not_printed(expected, printed)
                assert not missing, f"$ {command}\n{printed}\nwithout: {missing}"
            else:
                assert _tidy(printed) == _tidy(expected), f"$ {command}\n{printed}"


def lines_not_printed(expected: str, printed: str) -> list[str]:
    """Return the documented lines that were not printed; … in a line stands for anything.

    What all ranks say at once is one line; on a busy machine it may be one of each.
    """
    lines = _tidy(printed)
    missing = []
    for wanted in _tidy(expected):
        if wanted.strip() == "…":
            continue
        of_each: list[str] = []
        if of_all := _OF_ALL.fullmatch(wanted):
            of_each = [f"[rank {rank}] {of_all[2]}" for rank in range(int(of_all[1]))]
        if not _is_printed(wanted, lines) and not (
            of_each and all(_is_printed(one, lines) for one in of_each)
        ):
            missing.append(wanted)
    return missing


def _is_printed(wanted: str, lines: list[str]) -> bool:
    pattern = re.compile(".*".join(re.escape(part) for part in wanted.split("…")))
    return any(pattern.fullmatch(line) for line in lines)


def as_documented(printed: str, folder: Path) -> str:
    """Return what was printed with this machine's name, the time and the folder taken out."""
    text = _HOST.sub("gpu-server", printed.rstrip()).replace(str(folder), "/home/ana")
    text = _RUN.sub(r"20260131-120000-\1-57b9", text)
    return _TOOK.sub(lambda found: f"{found[1]} 5 s" if found[1] else "5 s", text)


def steps(body: str) -> Iterator[tuple[str, str]]:
    """Divide a console block into commands, each with what it prints."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        while command.endswith("\\"):
            more, _, expected = expected.partition("\n")
            command = f"{command}\n{more}"
        if document := _HERE_DOCUMENT.search(command):
            inside, end, expected = expected.partition(f"\n{document[1]}\n")
            command = f"{command}\n{inside}{end}"
        yield command, expected.rstrip()


def _tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def surroundings(folder: Path, machine: str) -> dict[str, str]:
    """Return the environment of a machine whose GPUs are made up, with a home of its own."""
    (folder / "nvml").mkdir()
    nvml_stub.build(folder / "nvml")
    scenario = nvml_stub.write(folder / "nvml" / "scenario.json", getattr(scenarios, machine)())
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("VISIBLE_DEVICES")}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "TORCHMUSTER_CLAIMS_DIR": str(folder / "nvml" / "claims"),
        "LD_LIBRARY_PATH": str(folder / "nvml"),
        "NVML_STUB_SCENARIO": str(scenario),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), ConsoleParser()],
    patterns=["docs/*.md", "docs/**/*.md"],
    excludes=["docs/tutorial.md", "docs/generated/*"],
    path=str(Path(__file__).resolve().parent.parent),
).pytest()
