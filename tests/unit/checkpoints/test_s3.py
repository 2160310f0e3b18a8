"""Checkpoints in a real service of the S3 kind on this machine, which is killed in the middle of an upload."""

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.integrations]

TESTS = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("saving_to_s3.py")
SECRET = "made-up-secret"
SERVICE = """
import sys
import urllib.request
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


@contextmanager
def service(port: int = 0) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run a service, which keeps everything in its memory; yields it and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


class Line(socketserver.BaseRequestHandler):
    """A connection to the service, with the fault that the line has at the moment."""

    server: "FaultyLine"

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as service:
            answers = threading.Thread(target=self._pass_on, args=(service, self.request))
            answers.start()
            self._pass_on(self.request, service)
            answers.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(2**16):
                fault, is_request = self.server.fault, source is self.request
                if fault == "slow":
                    time.sleep(0.05)
                elif fault == "503" and is_request:
                    answer = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
                    source.sendall(answer)
                    break
                elif fault == ("cut" if is_request else "partial"):
                    target.sendall(piece[: len(piece) // 2])
                    break
                target.sendall(piece)
        except OSError:
            pass  # the other side is closed already
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class FaultyLine(socketserver.ThreadingTCPServer):
    """A line between a client and the service, whose fault a test sets."""

    daemon_threads = True
    fault: str | None = None

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Line)
        self.port = port


@contextmanager
def faulty_line(port: int) -> Iterator[FaultyLine]:
    with FaultyLine(port) as line:
        thread = threading.Thread(target=line.serve_forever)
        thread.start()
        try:
            yield line
        finally:
            line.shutdown()
            thread.join()


class Client:
    """The program that saves, and its answers."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def send(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, words: str) -> Any:
        self.send(words)
        return self.answer()


@contextmanager
def client(url: str, port: int, **more: str) -> Iterator[Client]:
    environment = {
        **os.environ,
        **more,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "made-up-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # how patient the client is, is not asked here
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), url],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Client(process)
    finally:
        process.kill()
        process.communicate()


def test_checkpoints_in_s3_and_a_service_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    pytest.importorskip("moto")
    with service() as (server, port), client("s3://bucket/run", port) as saver:
        what, why, fix = saver.ask("save 1")["error"]
        assert what.endswith(" s3://bucket/run")
        assert why.startswith("FileNotFoundError: ")
        assert "AWS_ENDPOINT_URL" in fix
        saver.ask("bucket bucket")
        old, new = saver.ask("save 10"), saver.ask("save 20")
        assert saver.ask("names") == {old: 3, new: 3}
        assert saver.ask("newest") == new
        assert saver.ask("download")[0] == "manifest.json"
        saver.ask(f"spoil {new}")
        assert saver.ask(f"verify {new}") == ["checkpoint-file-changed"]
        assert saver.ask("newest") == old
        saver.ask(f"delete {new}")
        assert saver.ask("names") == {old: 3}
        large = tmp_path / "shard-00001-model.safetensors"
        large.write_bytes(bytes(120 * 2**20))  # in several parts
        saver.send(f"upload {large}")
        assert _checkpoints_seen(port) == {old}  # nothing of it is to be seen before it is complete
        server.kill()
        server.wait()
        killed = saver.answer()["error"]
        assert killed[0].endswith(" s3://bucket/run")
        assert SECRET not in "".join(killed)
        assert saver.ask("newest")["error"][0] == what

        with service(port):
            saver.ask("bucket bucket")
            again = saver.ask("save 40")
            assert saver.ask("newest") == again


def _checkpoints_seen(port: int) -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket?list-type=2") as answer:
        return set(re.findall(r"<Key>run/(step-[^/]*)/", answer.read().decode()))


def test_faults_of_the_line_leave_whole_checkpoints_or_none() -> None:
    pytest.importorskip("moto")
    with (
        service() as (_, port),
        faulty_line(port) as line,
        client("s3://bucket/run", line.server_address[1]) as saver,
    ):
        saver.ask("bucket bucket")
        newest = saver.ask("save 10")
        for fault in ("cut", "503", "partial", "slow"):
            line.fault = fault
            saved, read = saver.ask("save 20"), saver.ask("newest")
            line.fault = None
            if fault == "slow":
                newest = saved
                assert read == newest
            else:
                for answer in (saved, read):
                    assert answer["error"][0] == "cannot access s3://bucket/run"
            # What was not committed is not seen; no damage is reported for what could not be read.
            assert saver.ask("newest") == newest
            assert saver.ask(f"verify {newest}") == []
        assert saver.ask("save 30") == saver.ask("newest")
