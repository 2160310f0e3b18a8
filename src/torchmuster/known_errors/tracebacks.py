"""Read what a failing Python process printed: the exception, and the line of the user's own code."""

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
# Everything that is not the user's: installed packages, Python itself, and torchmuster, also from a checkout of its source.
_FOREIGN = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*)[/\\]|^<frozen "
    r"|[/\\]src[/\\]torchmuster[/\\]|[/\\]torchmuster[/\\](?:train|launch|worker|integrations)[/\\]"
)
# Of the user's frames in a shortened traceback the innermost ones count, and of a message its first lines.
_FRAMES_SHOWN = 2
_MESSAGE_LINES_SHOWN = 4


def without_torch_prefix(text: str) -> str:
    """Remove torch's ``[rank3]: `` prefix from every line."""
    return _TORCH_PREFIX.sub("", text)


def exception_text(traceback: str) -> str:
    """Return the exception that a traceback ends with, and its whole message; "" without one."""
    lines = without_torch_prefix(traceback).rstrip().splitlines()
    begins = [n for n, line in enumerate(lines) if line in (_BEGINNING, _GROUP_BEGINNING)]
    start = begins[-1] if begins else -1
    if begins and lines[start] == _GROUP_BEGINNING:
        for line in lines[start + 1 :]:
            if _GROUP_LINE.match(line):
                return line.removeprefix("  | ")
        return ""
    # The frames are indented, and so is the source of a syntax error.
    for number in range(start + 1, len(lines)):
        if lines[number] and not lines[number][0].isspace():
            return "\n".join(lines[number:])
    return ""


def last_cxx_error(output: str) -> str:
    """Return the message of the last C++ exception (``what():``); "" if there is none."""
    messages: list[str] = _CXX_WHAT.findall(without_torch_prefix(output))
    return messages[-1].strip() if messages else ""


def last_error(output: str) -> str:
    """Return the last line of a log that looks like an exception or a usage error; else ""."""
    for line in reversed(without_torch_prefix(output).splitlines()):
        if _PYTHON_ERROR.match(line) or _USAGE_ERROR.match(line):
            return line
    return ""


def raised_at(traceback: str) -> str | None:
    """Return ``train.py:13``, the last line in the user's own code."""
    frames: list[tuple[str, str]] = _FRAME.findall(without_torch_prefix(traceback))
    own = [f"{file}:{line}" for file, line in frames if not _FOREIGN.search(file)]
    return own[-1] if own else None


def crashed_at(output: str) -> str | None:
    """Return ``train.py:13 in step``, the user's line at a fatal error (a signal)."""
    stack = without_torch_prefix(output).rpartition("Current thread 0x")[2].partition("\n\n")[0]
    for file, line, name in _FATAL_FRAME.findall(stack):  # the innermost first
        if not _FOREIGN.search(file):
            return f"{file}:{line} in {name}"
    return None


def shortened_traceback(text: str) -> str | None:
    """Return the last traceback of a text in a few lines: the user's innermost frames, and the exception.

    Without frames of the user's own code, the innermost ones are shown. None if there is no traceback of this form.
    """
    text = without_torch_prefix(text).rstrip()
    if _BEGINNING not in text:
        return None
    lines = text.rpartition(_BEGINNING)[2].strip("\n").splitlines()
    frames: list[list[str]] = []
    for number, line in enumerate(lines):
        if _FRAME.match(line):
            frames.append([line])
        elif frames and line.startswith("    "):
            frames[-1].append(line)
        elif not line.startswith(" "):
            message = lines[number : number + _MESSAGE_LINES_SHOWN]
            break
    else:
        return None
    own = [frame for frame in frames if not _is_foreign(frame)]
    shown = [_BEGINNING]
    for frame in (own or frames)[-_FRAMES_SHOWN:]:
        shown += frame[:3]  # the place, its source, and the marks below it
    return "\n".join([*shown, *message])


def last_output(text: str, lines: int) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _is_foreign(frame: list[str]) -> bool:
    place = _FRAME.match(frame[0])
    return place is not None and _FOREIGN.search(place[1]) is not None
