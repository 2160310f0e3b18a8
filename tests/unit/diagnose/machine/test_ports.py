"""Ports at which ranks meet, and who holds them."""

import socket
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, found, made_up_machine, only
from torchmuster.diagnose.machine import ports
from torchmuster.finding import Status

(CHECK,) = ports.CHECKS


def held(monkeypatch: pytest.MonkeyPatch, **holders: str) -> None:
    monkeypatch.setattr(ports, "holder_of", lambda port: holders.get(f"p{port}"))


def test_usual_ports_that_are_taken_are_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    held(monkeypatch, p29400="python old.py (pid 12, user ana)", p29500="pid 13")
    findings = list(CHECK.run(made_up_machine(tmp_path)))
    assert [one.status for one in findings] == [Status.NOTE, Status.NOTE]
    assert "29400" in findings[0].what
    assert "pid 12" in findings[0].what
    assert "29500" in findings[1].what
    assert "pid 13" in findings[1].what
    assert findings == snapshot


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1"])
def test_a_port_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, snapshot: SnapshotAssertion
) -> None:
    held(monkeypatch, p12345="python old.py (pid 12, user ana)")
    environment = {"MASTER_PORT": "12345", "MASTER_ADDR": address}
    finding = only(CHECK, made_up_machine(tmp_path, environment=environment))
    assert (finding.name, finding.status) == ("master-port-taken", Status.WARNING)
    assert "pid 12" in finding.why
    assert finding.fix.startswith("unset MASTER_PORT")
    assert "kill" not in finding.fix
    assert finding == snapshot


def test_a_run_that_is_under_way_holds_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    held(monkeypatch, p29500="python train.py (pid 12, user ana)")
    environment = {"MASTER_PORT": "29500", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    machine = made_up_machine(tmp_path, environment=environment)
    assert all_well(CHECK, machine) == snapshot


def test_a_real_holder_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machine = made_up_machine(tmp_path, environment={"MASTER_PORT": str(port)})
        findings = found(CHECK, machine)
        assert f"port {port}" in findings["master-port-taken"].what
