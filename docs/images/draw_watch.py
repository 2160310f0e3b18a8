"""Takes the pictures of ``muster watch --browser`` and of report.html, of runs that are made up for them.

    python docs/images/draw_watch.py            the two pictures of the documents
    python docs/images/draw_watch.py FOLDER     every size, light and dark, with 1, 8 and 64 ranks, to look at

It needs chromium.
"""

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from made_up_runs import (  # noqa: E402
    a_run,
    add_event,
    add_ranks,
    lifelike_lines,
    set_state,
    write_lines,
)
from torchmuster.launch.history import run_state  # noqa: E402
from torchmuster.launch.job import JobSpec  # noqa: E402
from torchmuster.monitor.serving import Access, serving  # noqa: E402
from torchmuster.monitor.views.live_page import LivePage  # noqa: E402
from torchmuster.monitor.views.run_picture import RunWatch  # noqa: E402
from torchmuster.monitor.views.run_report import run_report  # noqa: E402
from torchmuster.runfolder import RunFolder  # noqa: E402

LIGHT, DARK = 1, 0  # as Chromium counts them
LASTED_S = 5200.0


def made_up(folder: Path, ranks: int, phase: str, *, bad: bool = False) -> RunFolder:
    """Make the folder of a training of some length that was started again once."""
    now = time.time()
    run = a_run(folder, "synthetic data", phase)
    words = ("train", "--config", "llama.yaml")
    run_state.write_job(
        run, JobSpec(name=run.id, command=("torchmuster.worker",), typed=words, folder="/")
    )
    headline = "finished" if phase == "finished" else ""
    set_state(run, phase, headline, lasted_s=LASTED_S, now=now)
    write_lines(run, lifelike_lines(120, bad_from=110 if bad else None), now=now)
    add_ranks(
        run, ranks, slow=5 if ranks > 5 else None, spread=0.12, step=6_000, now=now, host="gpu-a"
    )
    devices = {"gpu-a": [f"cuda:{one} NVIDIA H100 80GB HBM3" for one in range(min(ranks, 8))]}
    for name, ago_s, facts in (
        ("joining", LASTED_S, {}),
        ("starting", LASTED_S - 4, {}),
        ("started", LASTED_S - 9, {"attempt": 0, "ranks": ranks, "devices": devices}),
        ("running", LASTED_S - 9, {}),
        (
            "restart",
            2000,
            {"headline": "rank 3 on gpu-a failed: killed (SIGKILL)", "from_step": 3500},
        ),
        ("starting", 1995, {}),
        ("started", 1988, {"attempt": 1, "ranks": ranks, "devices": devices}),
        ("running", 1988, {}),
    ):
        add_event(run, name, now - ago_s, **facts)
    if phase != "running":
        add_event(run, phase, now - 10, headline=headline)
    (run.metrics / "evaluations.jsonl").write_text('{"step": 6000, "epoch": 0, "loss": 2.31}\n')
    return run


@contextmanager
def live(run: RunFolder, *, held_up: bool = False) -> Iterator[str]:
    """Serve a run's page; give its address. Who is ``held_up`` has last looked half a minute ago."""
    page, watch = LivePage(), RunWatch(run)
    watch.look(time.time() - 400.0)  # conditions that must hold for minutes have held
    served = page.served()

    def answer(accept: str) -> tuple[bytes, str]:
        page.show(watch.look(time.time()))
        body, kind = served["/picture"].answer(accept)
        return body.replace(b'"age_s": 0.0', b'"age_s": 31.0' if held_up else b'"age_s": 0.0'), kind

    picture = dataclasses.replace(served["/picture"], answer=answer)
    with serving(Access(what="pages"), {**served, "/picture": picture}) as port:
        yield f"http://127.0.0.1:{port}/"


def take(address: str, picture: Path, *, width: int, height: int, scheme: int = LIGHT) -> None:
    """Take a picture of a page."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={scheme}",
                "--virtual-time-budget=5000",
                f"--screenshot={picture}",
                f"--window-size={width},{height}",
                address,
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def for_the_documents(folder: Path) -> None:
    """Take the two pictures that documents show."""
    with live(made_up(folder / "live", 8, "running")) as address:
        take(address, HERE / "watch-browser.png", width=1160, height=1780)
    page = folder / "report.html"
    page.write_text(run_report(made_up(folder / "over", 8, "finished")))
    take(page.as_uri(), HERE / "report.png", width=1160, height=1780)


def all_sizes(folder: Path, out: Path) -> None:
    """Take all pictures that should be looked at."""
    for ranks in (1, 8, 64):
        run = made_up(folder / f"live-{ranks}", ranks, "running", bad=ranks == 1)
        page = folder / f"report-{ranks}.html"
        page.write_text(
            run_report(made_up(folder / f"over-{ranks}", ranks, "finished", bad=ranks == 1))
        )
        with live(run) as address:
            for width, height in ((400, 3600), (1400, 1900)):
                for scheme, name in ((LIGHT, "light"), (DARK, "dark")):
                    for kind, where in (("live", address), ("report", page.as_uri())):
                        path = out / f"{kind}-{ranks}-{width}-{name}.png"
                        take(where, path, width=width, height=height, scheme=scheme)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        if len(sys.argv) > 1:
            all_sizes(Path(made), Path(sys.argv[1]).resolve())
        else:
            for_the_documents(Path(made))
