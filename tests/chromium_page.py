"""A page in a headless Chromium, driven over its DevTools protocol: read, clicked, pictured."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import GIVE_UP_S

websocket: Any = pytest.importorskip("websocket")

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="apt-get install chromium"
)
_LOOK_EVERY_S = 0.1
_SIZE = (1100, 1400)


class _BetweenPages(AssertionError):
    """The browser cannot answer: while one page makes way for another, there is nothing to be asked."""


class Page:
    """One page; what is asked of it is what a person can see or click."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=GIVE_UP_S)
        self._numbers = itertools.count(1)

    def open(self, address: str) -> None:
        """Go to an address."""
        self._ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def wait_until(
        self,
        expression: str,
        within_s: float = GIVE_UP_S,
        *,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until an expression holds in the page; ``meanwhile`` is done before each look at it."""
        deadline = time.monotonic() + within_s
        while True:
            meanwhile()
            if self._holds(expression):
                return
            if time.monotonic() > deadline:
                seen = self.value("document.body.innerText")
                raise AssertionError(
                    f"not within {within_s} s: {expression}; the page has:\n{seen}"
                )
            time.sleep(_LOOK_EVERY_S)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.value(expression))
        except _BetweenPages:
            return False

    def click(self, selector: str, place: int = 0) -> None:
        """Click in the middle of one of the elements that a selector finds, with the mouse."""
        one = f"document.querySelectorAll({json.dumps(selector)})[{place}]"
        self.wait_until(f"!!{one}")
        x, y = self.value(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({one}.getBoundingClientRect())"
        )
        words = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, **words)

    def picture(self, path: Path) -> None:
        """Take a picture of what is seen."""
        data = self._ask("Page.captureScreenshot")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Let go of the page."""
        self._socket.close()

    def _ask(self, method: str, **words: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": words}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                if "error" in answer:
                    raise _BetweenPages(answer)
                result: dict[str, Any] = answer["result"]
                return result


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Give a page of a browser that keeps its profile in this folder; both end with it."""
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--window-size={_SIZE[0]},{_SIZE[1]}",
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
    ]
    with (folder / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder, process_group=0)
    try:
        page = Page(_address(browser, folder / "profile" / "DevToolsActivePort"))
        try:
            yield page
        finally:
            page.close()
    finally:
        browser.terminate()
        try:
            browser.wait(30)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()


def _address(browser: "subprocess.Popen[bytes]", told: Path) -> str:
    deadline = time.monotonic() + GIVE_UP_S
    while not told.exists() or not told.read_text().strip():
        assert browser.poll() is None, "the browser has ended"
        assert time.monotonic() < deadline, "the browser does not say where it listens"
        time.sleep(_LOOK_EVERY_S)
    pages = f"http://127.0.0.1:{told.read_text().split()[0]}/json/list"
    while True:  # it listens before it has a page
        with urllib.request.urlopen(pages, timeout=GIVE_UP_S) as answer:
            for one in json.load(answer):
                if one["type"] == "page":
                    return str(one["webSocketDebuggerUrl"])
        assert time.monotonic() < deadline, "the browser has no page"
        time.sleep(_LOOK_EVERY_S)
