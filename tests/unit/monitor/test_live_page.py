"""The page that is served: what it is given, who is given it, and what a browser may do with it."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from made_up_runs import NOW, a_run, add_event, add_lines, add_ranks
from patience import GIVE_UP_S
from script_checkpoints import record, torch_file
from torchmuster.monitor.serving import Access, serving
from torchmuster.monitor.views.live_page import LivePage
from torchmuster.monitor.views.run_picture import RunWatch

TOKEN = "a-long-enough-token"


@pytest.fixture
def page(tmp_path: Path) -> LivePage:
    run = a_run(tmp_path)
    add_lines(run)
    add_ranks(run, 2)
    add_event(run, "running", NOW - 50)
    page = LivePage()
    page.show(RunWatch(run).look(NOW))
    return page


@pytest.fixture
def port(page: LivePage) -> Iterator[int]:
    with serving(Access(what="pages"), page.served()) as port:
        yield port


def _ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()


def test_the_newest_checkpoint_of_a_script_is_shown(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    path = torch_file(tmp_path / "<b>step40.pt")
    record(run, path, 40, library="torch.save", at_unix_s=NOW - 30)
    page = LivePage()
    page.show(RunWatch(run).look(NOW))
    with serving(Access(what="pages"), page.served()) as port:
        tiles = json.loads(_ask(port, "/picture")[1])["parts"]["tiles"]
    assert "&lt;b&gt;step40.pt</td><td>torch.save</td><td>4.9 KiB</td><td>30 s ago" in tiles
    assert "<td>complete</td>" in tiles


def test_the_page_asks_for_nothing_but_its_own_script_and_picture(port: int) -> None:
    status, text, headers = _ask(port, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert '<script src="page.js" defer></script>' in text
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    status, script, headers = _ask(port, "/page.js")
    assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    assert "fetch(" in script


def test_the_page_itself_says_nothing_of_the_run(port: int) -> None:
    for path in ("/", "/page.js"):
        assert "llm" not in _ask(port, path)[1]


def test_the_picture_has_a_part_for_each_place_of_the_page(port: int) -> None:
    status, text, headers = _ask(port, "/picture")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert headers["Cache-Control"] == "no-store"
    told = json.loads(text)
    assert told["title"] == "llm: running"
    assert 0 <= told["age_s"] < 60
    assert told["over"] is False
    markup = _ask(port, "/")[1]
    for name, part in told["parts"].items():
        assert f'id="{name}"' in markup
        assert part


def test_before_the_first_look_there_is_nothing_to_show() -> None:
    with serving(Access(), LivePage().served()) as port:
        assert json.loads(_ask(port, "/picture")[1])["parts"] == {}


@pytest.mark.parametrize("path", ["/", "/page.js", "/picture"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
)
def test_pages_of_others_are_refused(
    port: int, path: str, headers: dict[str, str], status: int
) -> None:
    assert _ask(port, path, **headers)[0] == status


@pytest.mark.parametrize("path", ["/metrics", "/page.css", "/../page.js", "/picture/"])
def test_there_is_nothing_else(port: int, path: str) -> None:
    assert _ask(port, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_can_be_changed(port: int, method: str) -> None:
    assert _ask(port, "/picture", method)[0] == 501


def test_without_the_token_the_page_is_empty(page: LivePage) -> None:
    with serving(Access(token=TOKEN), page.served()) as port:
        assert _ask(port, "/")[0] == _ask(port, "/page.js")[0] == 200
        assert _ask(port, "/picture")[0] == 401
        assert _ask(port, f"/picture?token={TOKEN}")[0] == 401, "addresses end up in logs"
        assert _ask(port, "/picture", Authorization="Bearer wrong")[0] == 401
        assert _ask(port, "/picture", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert _ask(port, "/nothing")[0] == 401
