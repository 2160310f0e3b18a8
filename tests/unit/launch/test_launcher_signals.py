"""What signals do while there are ranks, and what they do afterwards."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.stopping import StopSignals
from torchmuster.runfolder import create_run_folder


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_warnings_are_heeded_while_there_are_ranks_and_do_afterwards_what_they_did_before(
    tmp_path: Path,
) -> None:
    passed_on: list[str] = []
    run = create_run_folder(tmp_path, "train")
    spec = JobSpec(name="train", command=("train.py",), folder=str(tmp_path))

    async def work() -> None:
        task = SimpleNamespace(spec=spec, run_folder=run, pass_on=passed_on.append)
        with StopSignals(task) as requests:  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGUSR1)
            while not requests.is_warned:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    heard: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        asyncio.run(work())
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert (passed_on, heard) == (["SIGUSR1"], [signal.SIGUSR1])
