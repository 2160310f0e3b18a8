"""``muster top`` as text: readable at any width, with any number of ranks, with or without colours."""

from pathlib import Path

import pytest
from rich.text import Text

from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Device, DeviceProcess, Ecc
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.tickets import Ticket
from torchmuster.monitor.views.bars import bar, curve_of_percents
from torchmuster.monitor.views.top_picture import TopPicture
from torchmuster.monitor.views.top_screen import TopView, top_screen
from unit.monitor.made_up_top import (
    FIRST_PID,
    gpu,
    heartbeat,
    look,
    machine,
    on_machine,
    running,
    with_gpus,
)


def _lines(picture: TopPicture, width: int = 80, **view: object) -> list[str]:
    shown = top_screen(picture, width, TopView(**view)).plain.splitlines()  # type: ignore[arg-type]
    assert max(map(len, shown)) <= width
    return shown


def _row(shown: list[str], title: str, number: int = 0) -> str:
    """Return a line below the titles that begin with a word."""
    (at,) = [place for place, line in enumerate(shown) if line.split()[:1] == [title]]
    return shown[at + 1 + number]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_everything_fits(tmp_path: Path, width: int, ranks: int) -> None:
    running(tmp_path, *(heartbeat(rank) for rank in range(ranks)))
    shown = _lines(look(tmp_path, with_gpus(ranks)), width)
    assert shown[0].startswith("a  ")
    assert f"{ranks} x A100-SXM4-80GB" in shown[0]
    assert shown[2].startswith(f"llm  running  {ranks} rank")
    titles = next(line for line in shown if line.lstrip().startswith("rank▴"))
    assert ("others" in titles) is (width >= 80)
    assert len(shown) - shown.index(titles) - 1 == ranks, "a line for each rank, and nothing below"


def test_requests_that_wait_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMUSTER_CLAIMS_DIR", str(tmp_path / "claims"))
    claims = Claims(tmp_path / "claims")
    with claims.gate():
        ticket = Ticket(claims.queue, DeviceRequest(count=1), {})
    try:
        assert "queue 1 waiting" in _lines(look(tmp_path, with_gpus(1)), 120)[1]
    finally:
        ticket.give_back()
    assert "queue" not in _lines(look(tmp_path, with_gpus(1)), 120)[1]


def test_a_gpu_in_80_and_in_200_columns(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0))
    picture = look(tmp_path, with_gpus(1))
    narrow = _row(_lines(picture, 80), "GPU").split()
    assert " ".join(narrow) == "0 ━━━━━━━━━─ 90% ━━━━━━━━━─ 70/80 GiB 62°C 390/400 W rank 0"
    wide = _row(_lines(picture, 200), "GPU")
    assert wide.endswith("rank 0  llm")
    assert "▇" in wide, "how busy it was lately"


def test_a_rank_in_80_and_in_200_columns(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0, place="train.py:88 in step", doing="all_reduce"))
    picture = look(tmp_path, with_gpus(1))
    narrow = _lines(picture, 80)[-1].split()
    assert " ".join(narrow) == "0 0 1,200 0 s ━── 10% ━── 20% 1.5 4.0 GiB forward a…"
    wide = _lines(picture, 200)[-1]
    assert wide.endswith("forward  all_reduce  train.py:88 in step")
    assert str(FIRST_PID) in wide
    assert "70.0 GiB" in wide


@pytest.mark.parametrize(
    ("device", "narrow", "wide"),
    [
        (gpu(0, throttled_by=("heat (driver)",)), "!heat", "!slowed by heat (driver)"),
        (gpu(0, throttled_by=("power limit",)), "at limit", "at power limit"),
        (gpu(0, ecc=Ecc(enabled=True, uncorrected=3)), "!ECC", "!3 memory errors"),
        (gpu(0, xid_errors=((79, 1), (31, 4))), "!Xid79", "!Xid 79 x1"),
        (gpu(0, trouble="GPU is lost"), "!lost", "!does not answer: GPU is lost"),
    ],
    ids=["heat", "power", "ecc", "xid", "lost"],
)
def test_what_is_wrong_with_a_gpu_is_said_in_words(
    tmp_path: Path, device: Device, narrow: str, wide: str
) -> None:
    picture = look(tmp_path, machine(device))
    assert _row(_lines(picture, 80), "GPU").endswith(f"  {narrow}")
    assert _row(_lines(picture, 200), "GPU").endswith(f"  {wide}")
    cell = _row(["GPU", *_lines(picture, 80, cells=True)[3:]], "GPU")
    assert cell.endswith("!") is narrow.startswith("!")


def test_a_hot_gpu_and_a_full_one_are_marked(tmp_path: Path) -> None:
    picture = look(tmp_path, machine(gpu(0, temperature_c=87, used_bytes=79 * 2**30)))
    row = _row(_lines(picture), "GPU")
    assert "!87°C" in row
    assert "━━━━━━━━━━! " in row


def test_who_else_is_on_a_gpu(tmp_path: Path) -> None:
    several = tuple(
        DeviceProcess(pid=pid, compute=True, memory_bytes=pid, user="ben", command="python x.py")
        for pid in (1, 2, 3)
    )
    picture = look(tmp_path, machine(gpu(0, processes=several)))
    assert _row(_lines(picture, 80), "GPU").endswith("ben +2")
    assert _row(_lines(picture, 200), "GPU").endswith("ben  python x.py +2")


def test_many_gpus_are_cells_unless_lines_are_asked_for(tmp_path: Path) -> None:
    picture = look(tmp_path, with_gpus(64))
    cells = _lines(picture)
    assert not [line for line in cells if line.split()[:1] == ["GPU"]]
    first = next(line for line in cells if line.startswith("  0 "))
    assert first.split()[:5] == ["0", "━━━━━─", "90%", "70G", "62°"]
    assert sum(line.count("62°") for line in cells) == 64
    assert "busy" in "".join(_lines(picture, cells=False))


def test_different_gpus_have_their_names_where_there_is_room(tmp_path: Path) -> None:
    node = machine(gpu(0), gpu(1, name="NVIDIA GeForce RTX 4090"))
    shown = _lines(look(tmp_path, node), 120)
    assert "1 x A100-SXM4-80GB, 1 x RTX 4090" in shown[0]
    assert "RTX 4090" in _row(shown, "GPU", 1)


def test_several_machines_have_their_names(tmp_path: Path) -> None:
    run = running(tmp_path, heartbeat(0))
    on_machine(run, heartbeat(1), host="b", devices=(gpu(0, host="b", pid=FIRST_PID + 1),))
    shown = _lines(look(tmp_path, with_gpus(1)))
    assert "2 x A100-SXM4-80GB on 2 hosts" in shown[0]
    assert _row(shown, "host").split()[0] == "a"
    assert _row(shown, "host", 1).split()[0] == "b"
    assert _row(shown, "host", 1).endswith("rank 1")
    assert shown[-1].split()[:3] == ["1", "b", "0"]


def test_several_runs_have_their_names(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0), name="one")
    running(tmp_path, heartbeat(0, pid=1), name="two")
    shown = _lines(look(tmp_path, machine()))
    assert {line.split()[0] for line in shown[-2:]} == {"one", "two"}


def test_ranks_that_stand_out_do_so_without_colours(tmp_path: Path) -> None:
    heartbeats = (
        heartbeat(0, silent_s=40.0),
        heartbeat(1, data_share=0.6),
        heartbeat(2, communication_share=0.0),
        heartbeat(
            3, communication_share=None, data_share=None, busy=None, memory_bytes=None, step=None
        ),
    )
    running(tmp_path, *heartbeats)
    silent, starved, slow, unknown = _lines(look(tmp_path, machine()))[-4:]
    assert "!40 s" in silent
    assert "!60%" in starved
    assert "!slowest" in slow
    assert unknown.split() == ["3", "-", "-", "0", "s", "-", "-", "-", "-", "loading", "da…"]


def test_the_order_is_marked_in_the_titles(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0), heartbeat(1, silent_s=3.0))
    picture = look(tmp_path, machine())
    assert "rank▴" in "".join(_lines(picture))
    assert "rank▾" in "".join(_lines(picture, reverse=True))
    by_silence = _lines(picture, order="silent")
    assert "silent▾" in "".join(by_silence)
    assert by_silence[-2].split()[0] == "1"


def test_without_gpu_and_without_run(tmp_path: Path) -> None:
    shown = _lines(look(tmp_path, machine()))
    assert "no GPU" in shown[0]
    assert shown[1].startswith("cpu ")
    assert shown[-1].startswith("ranks: no active run")


def test_a_run_whose_ranks_are_not_there_yet(tmp_path: Path) -> None:
    running(tmp_path)
    assert _lines(look(tmp_path, machine()))[-1] == "ranks: no heartbeat yet"


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0, place="\x1b[2Jx"), name="\x1b[2Jllm", host="\x1b[1mb")
    picture = look(tmp_path, machine(gpu(0, name="\x1b[2Jcard")))
    for width in (80, 200):
        assert "\x1b" not in top_screen(picture, width, TopView()).plain


def test_alerts_are_below(tmp_path: Path) -> None:
    shown = _lines(look(tmp_path, machine(gpu(0, xid_errors=((79, 1),)))), 200)
    assert shown[-2].lstrip().startswith("critical a: ")
    assert shown[-1].lstrip().startswith("fix ")


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "────"), (0.03, "━───"), (0.5, "━━──"), (1.7, "━━━━"), (None, "    ")],
)
def test_bars(share: float | None, shown: str) -> None:
    assert bar(share, 4).plain == shown


def test_curves_end_with_the_newest() -> None:
    assert curve_of_percents([0, 50, 100], 5).plain == "  ▁▄█"
    assert curve_of_percents([0, 50, 100], 2).plain == "▄█"
    assert isinstance(curve_of_percents([], 3), Text)
