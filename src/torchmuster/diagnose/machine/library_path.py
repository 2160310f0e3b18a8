"""LD_LIBRARY_PATH and LD_PRELOAD: libraries that take precedence over those of torch."""

import re
from collections.abc import Iterator
from pathlib import Path

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine.torch_build import read_build
from torchmuster.finding import Finding, Status
from torchmuster.redaction import redact_text

# Torch ships the version of these that it is built with; another version breaks it or slows it
# down.
_TORCHS_OWN = re.compile(r"(libnccl|libcudnn|libtorch\w*|libc10\w*)\.so(\.\d+)*$")
# Newer versions of these are backward compatible.
_USUALLY_HARMLESS = re.compile(r"(libcudart|libcublas|libstdc\+\+)\.so(\.\d+)*$")
_SHOWN = 4


def _library_path(surroundings: Surroundings) -> Iterator[Finding]:
    build = read_build(surroundings)
    own = build.folder.parent if build else None
    value = surroundings.environment.get("LD_LIBRARY_PATH", "")
    named = [Path(one) for one in dict.fromkeys(value.split(":")) if one]
    # The lib folder of an environment belongs to the torch inside it.
    folders = [
        one for one in named if own is None or (own not in one.parents and one not in own.parents)
    ]
    hard = [file for folder in folders for file in _matching(folder, _TORCHS_OWN)]
    if build is None or not build.cuda:  # then there is no NCCL of its own to be replaced
        hard = [file for file in hard if file.name.startswith(("libtorch", "libc10"))]
    soft = [file for folder in folders for file in _matching(folder, _USUALLY_HARMLESS)]
    if hard and not (build and build.cuda):
        yield _instead(hard, Status.WARNING, "the loader searches there first")
    elif hard or soft:
        # The wheels for CUDA have an RPATH, which takes precedence over the variable.
        why = "the loader searches there first, unless torch has an RPATH, as CUDA wheels do"
        yield _instead(hard or soft, Status.NOTE, why)
    preloaded = surroundings.environment.get("LD_PRELOAD", "")
    if preloaded:
        yield Finding(
            name="preloaded-library",
            status=Status.NOTE,
            what=f"LD_PRELOAD={redact_text(preloaded)} is loaded into every program",
            why="it can replace any function that torch calls",
            fix="unset LD_PRELOAD  # unless it is intended",
        )
    if not (hard or soft or preloaded):
        words = f"LD_LIBRARY_PATH is {'set, but does not replace libraries of torch' if named else 'not set'}"
        yield Finding(name="library-path", status=Status.OK, what=words)


def _instead(files: list[Path], status: Status, why: str) -> Finding:
    names = ", ".join(dict.fromkeys(file.name for file in files[:_SHOWN]))
    return Finding(
        name="library-path",
        status=status,
        what=f"LD_LIBRARY_PATH has other versions of torch's libraries: {names}",
        why=f"{why}; torch was built and tested with its own versions",
        fix="unset LD_LIBRARY_PATH  # or remove these folders from it",
        evidence=", ".join(str(file) for file in files[:_SHOWN]),
    )


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if pattern.match(file.name))
    except OSError:
        return []


CHECKS = (
    Check(
        name="library-path",
        asks="Does LD_LIBRARY_PATH or LD_PRELOAD replace libraries of torch?",
        run=_library_path,
        systems=("linux",),
    ),
)
