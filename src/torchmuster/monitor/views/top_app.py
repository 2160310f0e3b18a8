"""``muster top``, live: layout, updates and key bindings."""

import dataclasses
import threading
from collections.abc import Callable
from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.message import Message
from textual.widgets import Footer, Static

from torchmuster.monitor.views.top_picture import TopPicture
from torchmuster.monitor.views.top_screen import TopView, top_parts
from torchmuster.monitor.views.top_tables import MOST_LINES, orders_shown

_SCROLLBAR = 1


class Looked(Message):
    """A new picture is available."""

    def __init__(self, picture: TopPicture) -> None:
        super().__init__()
        self.picture = picture


class LookFailed(Message):
    """Taking a picture failed."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Scrolled(VerticalScroll):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll_up", "scroll", key_display="↑↓"),
        Binding("down", "scroll_down", "scroll", show=False),
    ]


class TopApp(App[Exception]):
    """Shows pictures; exits with the error if taking one fails."""

    TITLE = "muster top"
    ENABLE_COMMAND_PALETTE = False
    # Only the terminal's own colours and background, so that light themes are readable too.
    CSS = """
    #devices, #ranks { scrollbar-size-vertical: 1; }
    #devices { height: auto; max-height: 45%; margin-top: 1; }
    #titles { height: 1; margin-top: 1; }
    #ranks { height: 1fr; }
    #alerts { height: auto; max-height: 30%; }
    Footer, FooterKey { background: ansi_default; color: ansi_default; }
    FooterKey .footer-key--key { background: ansi_default; color: ansi_default; text-style: reverse; }
    FooterKey .footer-key--description { background: ansi_default; color: ansi_default; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("g", "cells", "GPU view"),
        Binding("space", "hold", "hold"),
    ]

    def __init__(
        self,
        first: TopPicture,
        look: Callable[[], TopPicture],
        *,
        every_s: float,
        view: TopView | None = None,
    ) -> None:
        super().__init__(ansi_color=True)
        self._picture = first
        self._view = view or TopView()
        self._held = False
        self._width = 80 - _SCROLLBAR
        self._looking = _Looking(self, look, every_s)

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        yield Static(id="head")
        with _Scrolled(id="devices"):
            yield Static(id="device-lines")
        yield Static(id="titles")
        with _Scrolled(id="ranks"):
            yield Static(id="rank-lines")
        yield Static(id="alerts")
        yield Footer()

    def on_mount(self) -> None:
        """Begin."""
        self.query_one("#ranks").focus()
        self._width = self.size.width - _SCROLLBAR
        self._show()
        self._looking.start()

    def on_unmount(self) -> None:
        """Stop polling without waiting for a driver that does not answer."""
        self._looking.over.set()

    def on_resize(self, event: Resize) -> None:
        """Refit to the new size, which the app itself knows only after this event."""
        self._width = event.size.width - _SCROLLBAR
        self._show()

    def on_looked(self, message: Looked) -> None:
        """Show the new picture."""
        if not self._held:
            self._picture = message.picture
            self._show()

    def on_look_failed(self, message: LookFailed) -> None:
        """Exit; the caller reports the error."""
        self.exit(message.error)

    def action_sort(self) -> None:
        """Sort the ranks by the next visible column."""
        shown = orders_shown(self._picture.ranks, self._width)
        here = shown.index(self._view.order) + 1 if self._view.order in shown else 0
        self._show(order=shown[here % len(shown)], reverse=False)

    def action_reverse(self) -> None:
        """Reverse the sort order."""
        self._show(reverse=not self._view.reverse)

    def action_cells(self) -> None:
        """Toggle between cells and lines for devices."""
        cells = self._view.cells
        now = len(self._picture.devices) > MOST_LINES if cells is None else cells
        self._show(cells=not now)

    def action_hold(self) -> None:
        """Pause or resume updates."""
        self._held = not self._held
        self._show()

    def _show(self, **changed: object) -> None:
        self._view = dataclasses.replace(self._view, **changed)  # type: ignore[arg-type]
        made = top_parts(self._picture, self._width, self._view)
        if self._held:
            made.head[0].append("  paused: space resumes", style="bold")
        # Some widgets are missing while the app opens and closes.
        widgets = {one.id: one for one in self.query(Static)}
        for name, lines in (
            ("head", made.head),
            ("device-lines", made.devices),
            ("titles", made.ranks[:1]),
            ("rank-lines", made.ranks[1:]),
            ("alerts", made.alerts),
        ):
            text = Text("\n").join(lines)
            text.no_wrap = True
            if (widget := widgets.get(name)) is not None:
                # In a group: Textual would replace the terminal's colours in a plain Text.
                widget.update(Group(text))
                widget.display = bool(lines)


class _Looking(threading.Thread):
    """Takes pictures in a background thread, so that a slow driver does not block the screen."""

    def __init__(self, app: TopApp, look: Callable[[], TopPicture], every_s: float) -> None:
        super().__init__(name="top", daemon=True)
        self._app = app
        self._look = look
        self._every_s = every_s
        self.over = threading.Event()

    def run(self) -> None:
        """Poll until stopped."""
        while not self.over.wait(self._every_s):
            message: Message
            try:
                message = Looked(self._look())
            except Exception as error:
                message = LookFailed(error)
            try:
                self._app.post_message(message)
            except RuntimeError:  # the app has exited
                return
