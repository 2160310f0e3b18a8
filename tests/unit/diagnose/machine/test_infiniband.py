"""Counters of InfiniBand ports, as the kernel tells them."""

from pathlib import Path

from made_up_machine import found, made_up_machine
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.infiniband import CHECKS

(CHECK,) = CHECKS
DAY_S = 86400


def machine(root: Path, *ports: tuple[str, int, int]) -> Surroundings:
    """A host that is up for ten days, with the state, link losses and symbol errors of its ports."""
    files = {"proc/uptime": f"{10 * DAY_S}.00 1.0\n"}
    for number, (state, downed, errors) in enumerate(ports):
        folder = f"sys/class/infiniband/mlx5_{number}/ports/1"
        files[f"{folder}/state"] = f"{state}\n"
        files[f"{folder}/counters/link_downed"] = f"{downed}\n"
        files[f"{folder}/counters/symbol_error"] = f"{errors}\n"
    return made_up_machine(root, files)


def names(surroundings: Surroundings) -> list[tuple[str, str]]:
    return [(one.name, one.status.value) for one in found(CHECK, surroundings).values()]


def test_a_cable_with_faults_is_named(tmp_path: Path) -> None:
    flaps = machine(tmp_path, ("4: ACTIVE", 50, 0))
    assert names(flaps) == [("infiniband-link-flaps", "warning")]
    assert "mlx5_0 port 1" in found(CHECK, flaps)["infiniband-link-flaps"].what
    errors = machine(tmp_path, ("4: ACTIVE", 0, 100_000))
    assert names(errors) == [("infiniband-symbol-errors", "warning")]


def test_a_port_that_is_down_is_a_note_beside_one_that_is_not(tmp_path: Path) -> None:
    one_left = machine(tmp_path, ("4: ACTIVE", 0, 0), ("1: DOWN", 0, 0))
    assert names(one_left) == [("infiniband-down", "note")]
    assert found(CHECK, one_left)["infiniband-down"].what.endswith("mlx5_1 port 1 (down)")
    none_left = machine(tmp_path / "none", ("2: INIT", 0, 0), ("1: DOWN", 0, 0))
    assert names(none_left) == [("infiniband-down", "warning")]
