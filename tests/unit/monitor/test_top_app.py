"""``muster top`` live: keys, sizes, new pictures, the end."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from patience import GIVE_UP_S
from torchmuster.monitor.views.top_app import Looked, LookFailed, TopApp
from torchmuster.monitor.views.top_picture import TopPicture
from unit.monitor.made_up_top import heartbeat, look, machine, running, with_gpus

NEVER_S = 3600.0


def _app(picture: TopPicture) -> TopApp:
    return TopApp(picture, lambda: picture, every_s=NEVER_S)


def _run(
    app: TopApp,
    steps: Callable[[Pilot[Exception]], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
) -> None:
    async def whole() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(pilot)

    asyncio.run(asyncio.wait_for(whole(), GIVE_UP_S))


def _screen(app: TopApp) -> list[str]:
    """Return what is on the screen, line by line."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    lines = ["".join(segment.text for segment in strip).rstrip() for strip in strips]
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    return lines


async def _until(pilot: Pilot[Exception], holds: Callable[[], bool]) -> None:
    """Wait until something is so on the screen: the toolkit draws a moment later, on a busy machine much later."""
    while True:
        with contextlib.suppress(AssertionError):  # while it is laid out anew
            if holds():
                return
        await pilot.pause(0.01)


async def _shown(pilot: Pilot[Exception], text: str) -> None:
    """Wait until something is on the screen."""
    app = pilot.app
    assert isinstance(app, TopApp)
    await _until(pilot, lambda: any(text in line for line in _screen(app)))


async def _ranks_are(pilot: Pilot[Exception], *ranks: str) -> None:
    """Wait until these ranks are on the screen, in this order."""
    app = pilot.app
    assert isinstance(app, TopApp)
    await _until(pilot, lambda: _ranks_shown(app) == list(ranks))


def _ranks_shown(app: TopApp) -> list[str]:
    lines = _screen(app)
    titles = [at for at, line in enumerate(lines) if line.lstrip().startswith("rank")]
    if len(titles) != 1:  # it is not drawn yet, or only half of it
        return []
    return [
        line.split()[0]
        for line in lines[titles[0] + 1 :]
        if line.split()[:1] and line.split()[0].isdecimal()
    ]


@pytest.fixture
def picture(tmp_path: Path) -> TopPicture:
    heartbeats = (
        heartbeat(0, data_share=0.05),
        heartbeat(1, data_share=0.25),
        heartbeat(2, silent_s=4.0),
    )
    running(tmp_path, *heartbeats)
    return look(tmp_path, with_gpus(3))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 12)])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_it_opens_at_every_size(tmp_path: Path, ranks: int, width: int, height: int) -> None:
    running(tmp_path, *(heartbeat(rank) for rank in range(ranks)))
    app = _app(look(tmp_path, with_gpus(ranks)))

    async def steps(pilot: Pilot[Exception]) -> None:
        await _until(pilot, lambda: _ranks_shown(app)[:1] == ["0"])
        assert _screen(app)[0].startswith("a  ")
        await _shown(pilot, " q  quit ")

    _run(app, steps, (width, height))


def test_keys_sort_the_ranks(picture: TopPicture) -> None:
    app = _app(picture)

    async def steps(pilot: Pilot[Exception]) -> None:
        await _ranks_are(pilot, "0", "1", "2")
        await pilot.press("r")
        await _ranks_are(pilot, "2", "1", "0")
        await pilot.press("s", "s")  # step, then silent
        await _ranks_are(pilot, "2", "0", "1")
        await pilot.press("s")
        await _ranks_are(pilot, "1", "2", "0")  # by the share of data
        await _shown(pilot, "data▾")
        for _ in range(4):
            await pilot.press("s")
        await _ranks_are(pilot, "0", "1", "2")  # once around

    _run(app, steps)


def test_it_fits_itself_to_a_new_size(picture: TopPicture) -> None:
    app = _app(picture)

    async def steps(pilot: Pilot[Exception]) -> None:
        await _ranks_are(pilot, "0", "1", "2")
        assert not any("pid" in line for line in _screen(app))
        await pilot.resize_terminal(200, 30)
        await _shown(pilot, " pid ")
        await pilot.resize_terminal(50, 20)
        await _until(pilot, lambda: " pid " not in "".join(_screen(app)))
        await _ranks_are(pilot, "0", "1", "2")

    _run(app, steps)


def test_gpus_as_lines_or_cells(picture: TopPicture) -> None:
    app = _app(picture)

    async def steps(pilot: Pilot[Exception]) -> None:
        def as_lines() -> bool:
            return any(line.startswith("GPU  busy") for line in _screen(app))

        await _until(pilot, as_lines)
        await pilot.press("g")
        await _until(pilot, lambda: not as_lines())
        await pilot.press("g")
        await _until(pilot, as_lines)

    _run(app, steps)


def test_a_new_picture_is_shown_unless_it_is_held(tmp_path: Path, picture: TopPicture) -> None:
    app = _app(picture)
    empty = look(tmp_path / "other", machine())

    async def steps(pilot: Pilot[Exception]) -> None:
        await pilot.press("space")
        await _until(pilot, lambda: "paused" in _screen(app)[0])
        app.post_message(Looked(empty))
        await pilot.pause()
        assert _ranks_shown(app) == ["0", "1", "2"]
        await pilot.press("space")
        app.post_message(Looked(empty))
        await _shown(pilot, "no active run")
        assert not any("GPU" in line for line in _screen(app)[1:-1])

    _run(app, steps)


def test_many_ranks_are_scrolled(tmp_path: Path) -> None:
    running(tmp_path, *(heartbeat(rank) for rank in range(64)))
    app = _app(look(tmp_path, machine()))

    async def steps(pilot: Pilot[Exception]) -> None:
        await _until(pilot, lambda: _ranks_shown(app)[:1] == ["0"])
        await pilot.press("end")
        await _until(pilot, lambda: _ranks_shown(app)[-1:] == ["63"])
        assert any(line.lstrip().startswith("rank▴") for line in _screen(app)), "under their titles"

    _run(app, steps)


def test_it_looks_again_by_itself(tmp_path: Path, picture: TopPicture) -> None:
    empty = look(tmp_path / "other", machine())
    app = TopApp(picture, lambda: empty, every_s=0.01)

    async def steps(pilot: Pilot[Exception]) -> None:
        await _shown(pilot, "no active run")

    _run(app, steps)
    assert "top" not in {one.name for one in threading.enumerate() if not one.daemon}


def test_q_ends_it(picture: TopPicture) -> None:
    app = _app(picture)

    async def steps(pilot: Pilot[Exception]) -> None:
        await pilot.press("q")
        while app.return_code is None:
            await asyncio.sleep(0.01)

    _run(app, steps)
    assert app.return_value is None
    assert app.return_code == 0


def test_a_look_that_fails_ends_it_with_the_error(picture: TopPicture) -> None:
    app = _app(picture)
    error = OSError("the folder is gone")

    async def steps(pilot: Pilot[Exception]) -> None:
        app.post_message(LookFailed(error))
        while app.return_value is None:
            await asyncio.sleep(0.01)

    _run(app, steps)
    assert app.return_value is error


def test_no_colour_where_none_is_wanted(
    picture: TopPicture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = _app(picture)

    async def steps(pilot: Pilot[Exception]) -> None:
        styles = [
            segment.style
            for strip in app.screen._compositor.render_strips()
            for segment in strip
            if segment.style is not None
        ]
        assert styles
        for style in styles:
            assert style.color is None or style.color.is_default
            assert style.bgcolor is None or style.bgcolor.is_default

    _run(app, steps)


def test_the_terminals_own_background_is_kept(picture: TopPicture) -> None:
    app = _app(picture)

    async def steps(pilot: Pilot[Exception]) -> None:
        grounds = {
            segment.style.bgcolor
            for strip in app.screen._compositor.render_strips()
            for segment in strip
            if segment.style is not None and segment.style.bgcolor is not None
        }
        assert all(one.is_default for one in grounds), grounds

    _run(app, steps)
