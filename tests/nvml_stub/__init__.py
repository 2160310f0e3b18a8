"""Builds a stand-in for NVIDIA's libnvidia-ml.so.1, and writes the scenarios it answers from."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["LIBRARY", "SCENARIO_VARIABLE", "build", "write"]

LIBRARY = "libnvidia-ml.so.1"
SCENARIO_VARIABLE = "NVML_STUB_SCENARIO"

_SOURCES = Path(__file__).resolve().parent
_FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def build(directory: Path) -> Path:
    """Compile the library into `directory`, and return it for use in LD_LIBRARY_PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    # Built beside its place and moved there whole: another process may be loading it already.
    unfinished = directory / f".{LIBRARY}.{os.getpid()}"
    command = ["gcc", *_FLAGS, f"-Wl,-soname,{LIBRARY}", "-o", str(unfinished)]
    command += [str(_SOURCES / name) for name in ("nvml_stub.c", "json.c")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"the NVML stub needs gcc to build: {error}") from error
    if done.returncode != 0:
        raise RuntimeError(f"the NVML stub did not build: {' '.join(command)}\n{done.stderr}")
    os.replace(unfinished, directory / LIBRARY)
    return directory


def write(path: Path, scenario: Mapping[str, object]) -> Path:
    """Put `scenario` at `path` in one step, so that no reader ever sees half of it."""
    text = json.dumps(scenario, indent=1)
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    # The library tells a new file by its time, and the kernel's own clock for files ticks only
    # every few milliseconds: two quick writes could look the same.
    now = time.time_ns()
    os.utime(unfinished, ns=(now, now))
    os.replace(unfinished, path)
    return path
