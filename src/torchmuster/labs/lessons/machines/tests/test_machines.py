"""The tests of the lab machines: pytest tests/, or muster lab check."""

import contextlib
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from torchmuster.labs.testing import (
    Submission,
    compare,
    exercise,
    mistake,
    replaced,
    require,
    watched,
)

_REACHED = "192.168.29.67"


class _ImaginedSocket:
    """A fake datagram socket of a machine with one route to others."""

    def __init__(self, *_: Any) -> None:
        self.peer = ""

    def __enter__(self) -> "_ImaginedSocket":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def connect(self, peer: tuple[str, int]) -> None:
        self.peer = peer[0]

    def getsockname(self) -> tuple[str, int]:
        return (_REACHED if self.peer == "192.168.29.5" else "0.0.0.0"), 40000  # noqa: S104

    def close(self) -> None:
        pass


@exercise
def test_own_address(submission: Submission) -> None:
    """The address on the route to the peer, on a machine whose name resolves differently."""
    with (
        replaced(socket, "socket", _ImaginedSocket),
        replaced(socket, "gethostbyname", lambda _: "127.0.1.1"),
    ):
        given = submission.code.own_address("192.168.29.5")
    name = given.startswith("127.")
    require(
        not name, "address-by-hostname", f"it returned {given}, which no other machine can reach"
    )
    nowhere = f"it returned {given}: connect the socket to the peer first"
    require(given != "0.0.0.0", "socket-not-connected", nowhere)  # noqa: S104
    require(given == _REACHED, "wrong-value", f"the route uses {_REACHED}; it returned {given}")


@contextlib.contextmanager
def _within(seconds: float, otherwise: str, seen: str) -> Iterator[None]:
    """Interrupt a call after a time limit with a named mistake."""

    def end(*_: Any) -> None:
        mistake(otherwise, seen)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@exercise
def test_connect(submission: Submission) -> None:
    """Retry while the other side starts late, but only within the time limit."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        connect = submission.code.connect  # loads the learner's file before the clock runs
        opening = threading.Timer(0.8, reserved.listen)
        opening.start()
        try:
            with _within(15.0, "tries-for-ever", "it was still trying after 15 s"):
                connect("127.0.0.1", port, 10.0).close()
        except OSError as error:
            seen = f"{type(error).__name__}: {error}; the other side started 0.8 s later"
            mistake("no-second-try", seen)
        finally:
            opening.join()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        port = closed.getsockname()[1]
        text = ""
        with (
            watched(socket, "create_connection") as tries,
            _within(8.0, "tries-for-ever", "with a limit of 0.5 s, it was still trying after 8 s"),
        ):
            try:
                submission.code.connect("127.0.0.1", port, 0.5)
            except OSError as error:
                text = str(error)
    require(len(tries) < 50, "tries-without-pause", f"{len(tries)} attempts in 0.5 s")
    named = "127.0.0.1" in text and str(port) in text
    require(named, "failure-without-address", f"the error says: {text!r}")


@exercise
def test_diagnose(submission: Submission) -> None:
    """Four distinguishable outcomes."""
    outcomes: dict[str, BaseException] = {
        "refused": ConnectionRefusedError(111, "Connection refused"),
        "silent": TimeoutError("timed out"),
        "unknown-name": socket.gaierror(-2, "Name or service not known"),
    }
    given = {}
    for expected, error in outcomes.items():

        def fail(*arguments: Any, error: BaseException = error, **named: Any) -> None:
            patient = named.get("timeout", arguments[1] if len(arguments) > 1 else None)
            require(patient is not None, "no-deadline", "create_connection was given no timeout")
            raise error

        with replaced(socket, "create_connection", fail):
            given[expected] = submission.code.diagnose("a-machine", 29400)
    outcomes_text = ", ".join(
        f"{expected} was reported as {outcome}" for expected, outcome in given.items()
    )
    require(len(set(given.values())) > 1, "all-errors-alike", outcomes_text)
    require(
        all(name == outcome for name, outcome in given.items()), "errors-confused", outcomes_text
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = submission.code.diagnose("127.0.0.1", server.getsockname()[1])
    require(found == "open", "wrong-value", f"for an open port it returned {found}")


@exercise
def test_gather_names(submission: Submission) -> None:
    """All names by rank; missing ranks are named."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set_timeout(timedelta(seconds=20))
    names = submission.code.gather_names(
        PrefixStore("first", store), submission.rank, 2, f"machine-{submission.rank}", 20.0
    )
    store.set(f"done/{submission.rank}", "")
    store.wait(["done/0", "done/1"])
    require(not isinstance(names[0], bytes), "names-as-bytes", f"it returned {names}")
    require(names[0] != names[1], "one-key-for-all", f"it gave {names}")
    require(names == ["machine-0", "machine-1"], "wrong-value", f"it gave {names}")
    text = ""
    store.set_timeout(timedelta(seconds=2))
    try:
        submission.code.gather_names(
            PrefixStore("second", store), submission.rank, 3, f"machine-{submission.rank}", 0.5
        )
    except (TimeoutError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
    else:
        mistake("missing-not-named", "rank 2 never joined, and nothing was raised")
    named = "2" in text and "machine/" not in text and "missing" in text
    require(named, "missing-not-named", f"rank 2 never joined; the error says: {text}")


@exercise
def test_gathering(submission: Submission) -> None:
    """[0, 1] on both."""
    given = submission.code.test_all_gather_basic()
    compare(given, [0, 1], "test_all_gather_basic", {"one-tensor-for-all": [1, 1]})


@exercise
def test_hello(submission: Submission) -> None:
    """Three lines, the last one only after all ranks have reached it."""
    printed = io.StringIO()
    if submission.rank == 1:
        time.sleep(0.3)
        submission.post("late", "")
    with contextlib.redirect_stdout(printed), watched(dist, "barrier") as barriers:
        submission.code.say_hello()
    start = f"[rank {submission.rank}]"
    host = socket.gethostname()
    wanted = [
        f"{start} world_size=2 device=cpu hostname={host}",
        f"{start} gathered=[0, 1]",
        f"{start} barrier OK; shutting down",
    ]
    lines = printed.getvalue().splitlines()
    require(bool(barriers), "barrier-only-printed", "it printed the line, and called no barrier")
    require(lines == wanted, "other-lines", f"printed: {lines}")
