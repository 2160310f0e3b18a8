"""A real MLflow server, from an environment of its own: the package here is its client, which has the same command."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlflow_stand_in import closed_port
from patience import GIVE_UP_S

PROGRAM = os.environ.get("MLFLOW_SERVER")
needs_mlflow_server = pytest.mark.skipif(
    PROGRAM is None,
    reason="python3 -m venv ~/mlflow; ~/mlflow/bin/pip install mlflow; export MLFLOW_SERVER=~/mlflow/bin/mlflow",
)


@contextmanager
def real_mlflow_server(folder: Path) -> Iterator[str]:
    """Start it with a database in a folder; give its address."""
    uri, said = closed_port(), folder / "server.log"
    where = ("--host", "127.0.0.1", "--port", uri.rpartition(":")[2], "--workers", "1")
    kept = ("--backend-store-uri", f"sqlite:///{folder}/kept.db")
    with (
        said.open("w") as log,
        subprocess.Popen(
            [str(PROGRAM), "server", *where, *kept],
            stdout=log,
            stderr=log,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            start_new_session=True,
        ) as started,
    ):
        try:
            deadline = time.monotonic() + GIVE_UP_S
            while not _answers(f"{uri}/health"):
                assert started.poll() is None, said.read_text()
                assert time.monotonic() < deadline, said.read_text()
                time.sleep(0.1)
            yield uri
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def _answers(uri: str) -> bool:
    try:
        with urllib.request.urlopen(uri, timeout=5):
            return True
    except OSError:
        return False
