"""Reading the texts in which Python, torch and C++ say how a process ended.

A traceback ends with the exception, but its message can have many lines; torch puts ``[rank3]: ``
before each of them; an exception group is drawn as a tree; C++ says ``what():`` and no more.
"""

import re

_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_BEGINNING = "Traceback (most recent call last):"
_GROUP_BEGINNING = "  + Exception Group Traceback (most recent call last):"
_GROUP_LINE = re.compile(r"  \| (?=\S)")
_CXX_WHAT = re.compile(r"^ *what\(\): +(.*)", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout): .*")
_USAGE_ERROR = re.compile(r"^\S+: error: .+")
_FRAME = re.compile(r'^ *(?:\| +)?File "([^"]+)", line (\d+)', re.MULTILINE)
_FATAL_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)
_LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*)[/\\]|^<frozen ")

# Wherever it is installed.
_OURS = re.compile(r"[/\\]torchmuster[/\\](?:train|launch|worker\.py|distributed\.py)")


def without_torch_prefix(text: str) -> str:
    """Take torch's ``[rank3]: `` from the beginning of every line."""
    return _TORCH_PREFIX.sub("", text)


def exception_text(traceback: str) -> str:
    """Return the exception that a traceback ends with, and its whole message."""
    lines = without_torch_prefix(traceback).rstrip().splitlines()
    begins = [n for n, line in enumerate(lines) if line in (_BEGINNING, _GROUP_BEGINNING)]
    start = begins[-1] if begins else 0
    if begins and lines[start] == _GROUP_BEGINNING:
        found = (n for n in range(start + 1, len(lines)) if _GROUP_LINE.match(lines[n]))
        first = next(found, None)
        return "" if first is None else lines[first].removeprefix("  | ")
    # The frames are indented, and so is the source of a syntax error.
    after = range(start + 1 if begins else 0, len(lines))
    first = next((n for n in after if lines[n] and not lines[n][0].isspace()), None)
    return "" if first is None else "\n".join(lines[first:])


def last_cxx_error(output: str) -> str:
    """Return what C++ said when it gave up (``what():``); "" if it said nothing."""
    spoken: list[str] = _CXX_WHAT.findall(without_torch_prefix(output))
    return spoken[-1].strip() if spoken else ""


def last_error(output: str) -> str:
    """Return the last line of a log that looks like an exception or a usage error; else ""."""
    for line in reversed(without_torch_prefix(output).splitlines()):
        if _PYTHON_ERROR.match(line) or _USAGE_ERROR.match(line):
            return line
    return ""


def raised_at(traceback: str) -> str:
    """Return ``train.py:13``, the last place in the user's own code; "" if there is none."""
    frames: list[tuple[str, str]] = _FRAME.findall(without_torch_prefix(traceback))
    own = [f"{file}:{line}" for file, line in frames if not _LIBRARY.search(file)]
    return own[-1] if own else ""


def crashed_at(output: str) -> str:
    """Return ``train.py:13 in step``, where a fatal error (a signal) met the user's own code; else ""."""
    stack = without_torch_prefix(output).rpartition("Current thread 0x")[2].partition("\n\n")[0]
    for file, line, name in _FATAL_FRAME.findall(stack):  # the innermost first
        if _own(file):
            return f"{file}:{line} in {name}"
    return ""


def from_own_code(text: str) -> str:
    """Leave out the frames before the user's own code, in each traceback of a text that comes to it."""
    lines = text.splitlines()
    kept: list[str] = []
    at = 0
    while at < len(lines):
        kept.append(lines[at])
        at += 1
        if kept[-1] == _BEGINNING:
            end = at
            while end < len(lines) and lines[end].startswith(" "):
                end += 1
            frames = [
                n for n in range(at, end) if (found := _FRAME.match(lines[n])) and _own(found[1])
            ]
            at = frames[0] if frames else at
    return "\n".join(kept)


def _own(file: str) -> bool:
    return not _LIBRARY.search(file) and not _OURS.search(file)


def tail(text: str, lines: int = 25) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-lines:])
