"""One direction of one port, by real sockets on this machine and by errors as the network gives them."""

import errno
import socket

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster import distributed
from torchmuster.finding import Finding, Status


def failing(monkeypatch: pytest.MonkeyPatch, error: OSError) -> Finding:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", broken)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    return distributed.check_connection("10.77.0.12", timeout_s=2)


def test_a_port_that_is_reached_is_ok() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = distributed.check_connection("127.0.0.1", port)
    assert finding.status is Status.OK
    assert socket.gethostname() in finding.what
    assert f"port {port}" in finding.what
    assert finding.evidence.startswith("from 127.0.0.1 in ")


def test_a_port_where_nobody_listens_is_refused_and_the_fix_opens_it() -> None:
    with socket.socket() as held:  # which keeps others from the port
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        finding = distributed.check_connection("127.0.0.1", port)
    assert (finding.name, finding.status) == ("connection-refused", Status.FAILURE)
    assert f"port {port}" in finding.why
    assert f"sudo ufw allow {port}/tcp" in finding.fix


@pytest.mark.parametrize(
    ("error", "name", "fix"),
    [
        (TimeoutError(), "connection-times-out", "29400"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "connection-prohibited", "29400"),
        (
            OSError(errno.ENETUNREACH, "Network is unreachable"),
            "no-route",
            "ip route get 10.77.0.12",
        ),
        (socket.gaierror(-2, "unknown"), "name-unknown", "/etc/hosts"),
    ],
    ids=["timeout", "prohibited", "no-route", "name"],
)
def test_each_cause_has_its_name_and_its_fix(
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    name: str,
    fix: str,
    snapshot: SnapshotAssertion,
) -> None:
    finding = failing(monkeypatch, error)
    assert finding.name == name
    assert fix in finding.fix
    assert finding == snapshot
