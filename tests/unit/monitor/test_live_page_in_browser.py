"""What people see of a run in a real browser: the newest picture, and the truth about its age."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium_page import Page, browsing, needs_chromium
from made_up_runs import NOW, a_run, add_event, add_lines, add_ranks, set_state
from torchmuster.monitor.serving import Access, serving
from torchmuster.monitor.views.live_page import LivePage
from torchmuster.monitor.views.run_picture import RunWatch
from torchmuster.runfolder import RunFolder

pytestmark = [pytest.mark.browser, needs_chromium, pytest.mark.integrations]
TOKEN = "a-long/enough token"
HEARTBEAT = "document.getElementById('heartbeat').textContent"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = a_run(tmp_path)
    add_lines(run)
    add_ranks(run, 2)
    add_event(run, "running", NOW - 50)
    return run


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


def test_the_newest_picture_is_shown_and_a_server_that_is_gone_is_told(
    run: RunFolder, browser: Page, tmp_path: Path
) -> None:
    shown, watch = LivePage(), RunWatch(run)

    def look() -> None:
        """Take a new picture: a busy machine may take longer than one of them is new."""
        shown.show(watch.look(NOW))

    look()
    with serving(Access(), shown.served()) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait_until("document.title === 'llm: running'")
        browser.wait_until(f"{HEARTBEAT} === 'live'", meanwhile=look)
        for part in ("head", "tiles", "curves", "times", "ranks", "happened"):
            assert browser.value(f"document.getElementById('{part}').innerText.length > 0"), part
        browser.picture(Path(os.environ.get("PICTURES", tmp_path)) / "watch.png")
        set_state(run, "finished")
        browser.wait_until(f"{HEARTBEAT} === 'the run has ended'", meanwhile=look)
    browser.wait_until(f"{HEARTBEAT}.startsWith('muster watch does not respond: last response 1')")
    assert browser.value("document.getElementById('heartbeat').className") == "stale"
    assert browser.value("document.getElementById('tiles').innerText.length > 0"), "it stays"


def test_the_token_is_taken_from_the_address_and_kept_for_the_tab_alone(
    run: RunFolder, browser: Page
) -> None:
    shown = LivePage()
    shown.show(RunWatch(run).look(NOW))
    with serving(Access(token=TOKEN), shown.served()) as port:
        address = f"http://127.0.0.1:{port}/"
        browser.open(address)
        browser.wait_until(f"{HEARTBEAT}.startsWith('token missing or wrong: open the address')")
        assert browser.value("document.getElementById('tiles').innerText") == ""
        browser.open("about:blank")
        browser.open(f"{address}#a-long%2Fenough%20token")
        browser.wait_until("document.title === 'llm: running'")
        assert browser.value("location.href") == address
        browser.value("window.isOld = true; location.reload()")
        browser.wait_until("!window.isOld && document.title === 'llm: running'")
        assert browser.value("localStorage.length") == 0


def test_what_a_run_says_is_shown_as_text_and_runs_nothing(tmp_path: Path, browser: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='caught'\">"
    run = a_run(tmp_path, phase="failed", headline=hostile)
    shown = LivePage()
    shown.show(RunWatch(run).look(NOW))
    with serving(Access(), shown.served()) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait_until("document.body.innerText.includes('<img src=x')")
        assert browser.value("document.images.length") == 0
        assert browser.value("document.title") != "caught"
