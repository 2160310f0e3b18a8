"""Bars and small curves for terminals, and the few colours that ``muster top`` uses.

The colours are the terminal's own blue and red, which people who confuse red and green tell apart, on its own
background, dark or light. Neither says anything that its neighbourhood does not say in words or by length.
"""

from collections.abc import Sequence

from rich.text import Text

BAR = "bright_blue"
WRONG = "bold red"
QUIET = "dim"
# Stands before what is wrong, for those who see no colours.
MARK = "!"
# From these widths on there is room for longer bars and whole words.
WIDE, VERY_WIDE = 110, 150
_LEVELS = "▁▂▃▄▅▆▇█"


def bar(share: float | None, length: int, *, wrong: bool = False) -> Text:
    """Return a bar that is as full as the share; empty where it is not known."""
    if share is None:
        return Text(" " * length)
    share = min(max(share, 0.0), 1.0)
    filled = round(share * length) or (1 if share > 0.02 else 0)
    text = Text().append("━" * filled, style=WRONG if wrong else BAR)
    return text.append("─" * (length - filled), style=QUIET)


def curve_of_percents(percents: Sequence[int], length: int) -> Text:
    """Return the last values as columns, the newest at the right."""
    last = percents[-length:] if length > 0 else ()
    signs = "".join(_LEVELS[min(max(one, 0), 100) * (len(_LEVELS) - 1) // 100] for one in last)
    return Text(signs.rjust(length), style=BAR)


def fitted(text: Text, width: int) -> Text:
    """Return a text in exactly this width; of a longer one the end is left out, and that is seen."""
    text = Text().append_text(text)  # so that what is added has no style of its own
    if text.cell_len > width:
        text.truncate(max(width - 1, 0))
        text.rstrip()
        text.append("…"[:width])
    text.append(" " * (width - text.cell_len))
    return text
