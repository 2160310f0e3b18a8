"""A run in a browser: a page that polls for the newest picture, and the server's answers.

The page and its script contain no run data, so they need no token; the data request does.
"""

import json
import time
from html import escape
from pathlib import Path

from torchmuster.monitor.serving import Served
from torchmuster.monitor.views import page_parts
from torchmuster.monitor.views.page_parts import rank_map
from torchmuster.monitor.views.run_picture import RunPicture
from torchmuster.pages import frame
from torchmuster.redaction import harmless

_SECTIONS = {
    "alerts": "alerts",
    "curves": "metrics by step",
    "times": "time breakdown, last steps",
    "ranks": "ranks",
    "happened": "events",
}
_HTML, _SCRIPT, _JSON = "text/html", "text/javascript", "application/json"


class LivePage:
    """Serves the newest picture; pictures and requests may come from different threads."""

    def __init__(self) -> None:
        nothing = {"title": "muster watch", "over": False, "heard_s": None, "parts": {}}
        self._newest = (json.dumps(nothing), time.monotonic())

    def show(self, picture: RunPicture) -> None:
        """Store the newest picture."""
        content = {
            "title": f"{harmless(picture.job)}: {picture.phase}",
            "over": picture.is_over,
            "heard_s": picture.heard_s,
            "parts": _live_page_parts(picture),
        }
        self._newest = (json.dumps(content, allow_nan=False), time.monotonic())

    def served(self) -> dict[str, Served]:
        """Return the server's answers, by path."""
        script = Path(__file__).with_name("page.js").read_bytes()
        return {
            "/": Served(
                answer=lambda _: (_page().encode(), f"{_HTML}; charset=utf-8"),
                needs_token=False,
                policy=frame.ASKS_ITS_SERVER,
            ),
            "/page.js": Served(
                answer=lambda _: (script, f"{_SCRIPT}; charset=utf-8"), needs_token=False
            ),
            "/picture": Served(answer=lambda _: (self._picture().encode(), _JSON)),
        }

    def _picture(self) -> str:
        content, looked_s = self._newest
        age_s = time.monotonic() - looked_s
        # Its age is only known at the time of the request.
        return f'{{"age_s": {age_s:.1f}, {content[1:]}'


def _page() -> str:
    sections = "".join(
        f'<section><h2>{escape(title)}</h2><div id="{name}"></div></section>'
        for name, title in _SECTIONS.items()
    )
    parts = [
        '<p id="heartbeat" role="status">waiting for the first response …</p>',
        '<div id="head" class="head"></div><div id="tiles"></div>',
        sections,
        "<noscript><p>This page needs JavaScript. Without JavaScript, run muster watch without "
        "--browser.</p></noscript>",
    ]
    return frame.html_page("muster watch", parts, style=page_parts.STYLE, script="page.js")


def _live_page_parts(picture: RunPicture) -> dict[str, str]:
    return {
        "head": page_parts.head_part(picture),
        "tiles": page_parts.tiles_part(picture) + page_parts.checkpoint_part(picture),
        "alerts": page_parts.alerts_part(picture.alerts, none="none"),
        "curves": page_parts.curves_part(picture),
        "times": page_parts.times_part(picture.shares) + page_parts.remark_part(picture),
        "ranks": rank_map(picture.ranks),
        "happened": page_parts.events_part(picture),
    }
