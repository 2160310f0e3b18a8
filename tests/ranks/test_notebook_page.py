"""A notebook's page in a real browser, served by a real Jupyter: cells on ranks, seen and clicked."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest

from chromium_page import Page, browsing, needs_chromium
from patience import GIVE_UP_S
from ranks.launched import MARK, living, wait_until_nothing_lives

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.browser,
    needs_chromium,
    pytest.mark.nightly,
    pytest.mark.integrations,
]

CELLS = [
    "%load_ext torchmuster\n%muster start --ranks 2 --device cpu",
    "%%ranks\nimport time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "print('hello')\nprint('I am', rank)",
    "%%ranks\nif rank == 1:\n    time.sleep(300)\nx = torch.ones(1)\ndist.all_reduce(x)",
    "%%ranks\n'here again'",
]
RUN = '[data-command="notebook:run-cell-and-select-next"]'
INTERRUPT = '[data-command="notebook:interrupt-kernel"]'


class Server:
    """A Jupyter server with a notebook in its folder."""

    def __init__(self, folder: Path) -> None:
        self.mark = os.urandom(8).hex()
        token = secrets.token_hex(16)
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(code) for code in CELLS],
            # Without it the page asks first which kernel to take.
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, folder / "try.ipynb")
        self._runtime = folder / "runtime"
        homes = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR")
        env = {
            **os.environ,
            MARK: self.mark,
            "JUPYTER_TOKEN": token,
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            **{name: str(folder / name.lower()) for name in homes},
        }
        words = ["-m", "notebook", "--no-browser", "--allow-root", "--ServerApp.port=0"]
        with (folder / "jupyter.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words], cwd=folder, env=env, stdout=log, stderr=log
            )
        self._log = folder / "jupyter.log"
        self.page = f"{self._url()}notebooks/try.ipynb?token={token}"

    def _url(self) -> str:
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            for told in self._runtime.glob("jpserver-*.json"):
                with contextlib.suppress(json.JSONDecodeError):  # it is being written
                    url: str = json.loads(told.read_text())["url"]
                    return url
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def kernel(self) -> psutil.Process:
        """Return the kernel's process."""
        return next(one for one in living(self.mark) if _is_kernel(one))

    def close(self) -> None:
        """End the server, and what a failed test left."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in living(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(30)


def _is_kernel(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # what belonged to earlier ranks may just end
        return "ipykernel_launcher" in process.cmdline()
    return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    try:
        yield one
    finally:
        one.close()


def part_of(number: int, selector: str) -> str:
    """Return an expression for the text of a part of a cell."""
    cell = f"document.querySelectorAll('.jp-CodeCell')[{number}]"
    return f"({cell}?.querySelector('{selector}')?.innerText ?? '')"


def run_cell(page: Page, number: int) -> None:
    """Click into a cell and on the button; a page that has just opened may not heed the first click."""
    began = f"/[*\\d]/.test({part_of(number, '.jp-InputPrompt')})"
    deadline = time.monotonic() + GIVE_UP_S
    while not page.value(began):
        assert time.monotonic() < deadline, page.value("document.body.innerText")
        page.click(".jp-CodeCell .cm-content", number)
        page.click(RUN)
        with contextlib.suppress(AssertionError):
            page.wait_until(began, 10)


def see(page: Page, number: int, text: str, within_s: float = GIVE_UP_S) -> None:
    shown = part_of(number, ".jp-OutputArea")
    page.wait_until(f"{shown}.includes({json.dumps(text)})", within_s)


def test_cells_on_ranks_are_seen_interrupted_and_leave_nothing(
    server: Server, tmp_path: Path
) -> None:
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    with browsing(tmp_path) as page:
        page.open(server.page)
        page.wait_until(
            "!!document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=\"idle\"]')"
        )
        run_cell(page, 0)
        see(page, 0, "2 ranks here")
        run_cell(page, 1)
        see(page, 1, "] hello")  # of all at once, or of each
        see(page, 1, "[rank 0] I am 0")
        see(page, 1, "[rank 1] I am 1")
        run_cell(page, 2)
        see(page, 2, "rank 0 waits in all_reduce at cell-3:4; rank 1 is in time.sleep at cell-3:2")
        see(page, 2, "rank 1 on")
        page.picture(pictures / "notebook-hang.png")
        page.click(INTERRUPT)
        see(page, 2, "Ctrl-C again")
        page.click(INTERRUPT)
        see(page, 2, "their variables are lost")
        run_cell(page, 3)
        see(page, 3, "[all 2 ranks] 'here again'")
        page.picture(pictures / "notebook-again.png")
        before = [one for one in living(server.mark) if not _is_kernel(one)]
        assert len(before) >= 5  # the server, the launcher, the node agent, the agent, the ranks
        kernel = server.kernel()
        ranks = [one for one in kernel.children(recursive=True) if one.is_running()]
        kernel.kill()
        _, alive = psutil.wait_procs(ranks, timeout=GIVE_UP_S)
        assert alive == []
    server.close()
    wait_until_nothing_lives(server.mark)
