"""Taking off a pasted log what is not the error: colours, line ends, who said it and when."""

import re

# Of a log that is longer, only the lines about trouble are read; of too many, the first and the last.
_LONGEST = 200_000
_TROUBLE = re.compile(
    r"error|exception|fail|fatal|warn|kill|signal|time[ds]? ?out|refused|denied|abort|unable|cannot|can't|"
    r"not |n't |no |invalid|mismatch|xid|assert|fault|memory|oom|closed|reset|exit ?code|limit|busy|illegal|"
    r"undefined|missing|broken|unexpected|expected|corrupt",
    re.IGNORECASE,
)

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Some pages and logs keep a colour's end but lose the escape before it.
_LOST_COLOUR = re.compile(r"\[(?:\d{1,2}(?:;\d{1,3})*)m")
_TYPOGRAPHY = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\xa0": " ", "\u200b": ""})
_LINE_PREFIX = re.compile(
    r"""^(?:
        \[(?:rank|default)\d+\]:[ ]?                    # torch, torchrun --tee
      | \[\d+,\d+\]<std(?:err|out)>:[ ]?                # mpirun
      | \[[\w-]+/\d+\]:[ ]?                             # torchrun with roles
      | \([\w. ]*pid=\d+(?:,[ ]ip=[\d.]+)?\)[ ]?        # Ray
      | [ ]{0,3}\d{1,4}:[ ]                             # srun --label
      | >[ ]?                                           # a quotation
      | [ ]*[|+][ ](?=\S)                               # an exception group
    )+""",
    re.VERBOSE | re.MULTILINE,
)


def cleaned(text: str) -> str:
    """Return the text as its programs meant it, line by line."""
    text = _shortened(text)
    text = _LOST_COLOUR.sub("", _COLOUR.sub("", text)).translate(_TYPOGRAPHY)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _LINE_PREFIX.sub("", text)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    lines = text.splitlines()
    near = {n for at, line in enumerate(lines) if _TROUBLE.search(line) for n in (at, at + 1)}
    text = "\n".join(line for n, line in enumerate(lines) if n in near)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n{text[-_LONGEST // 2 :]}"


def unwrapped(text: str) -> str:
    """Return the text without its line ends: a terminal may have broken it in the middle of words."""
    return re.sub(r"\n[ \t]*", "", text)


def line_at(text: str, place: int) -> str:
    """Return the line of a place in the text, cut where it is very long."""
    begin = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    line = text[begin : end if end >= 0 else len(text)]
    if len(line) > 300:
        cut = max(0, place - begin - 60)
        line = f"{'…' if cut else ''}{line[cut : cut + 300]}…"
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()
