"""A record comes back as it was written, and what is no record is refused with its reason."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_records import ENVIRONMENT, made_up
from torchmuster.bench import record
from torchmuster.bench.environment import disturbance, environment_differences, environment_here
from torchmuster.bench.record import Series
from torchmuster.errors import Impossible


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    one = replace(
        made_up({"a": [0.25, 0.5], "b": [1e-9]}),
        facts={"fit": {"alpha": 1e-6}, "checked": [True, None]},
        series=(
            Series(
                name="speed",
                unit="FLOP/s",
                better="higher",
                samples=(1.0,),
                labels={"size": 128, "type": "fp32"},
            ),
        ),
    )
    record.write_record(tmp_path / record.FILE, one)
    assert record.read_record(tmp_path / record.FILE) == one


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "its format version is 2; this torchmuster supports 1"),
        ({"record": {"bench": "matmul"}}, "missing required field `date`"),
        ({"record": []}, "Expected `object`, got `array`"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    document = msgspec.json.decode(record.encode_record(made_up({"a": [1.0]})))
    (tmp_path / record.FILE).write_bytes(msgspec.json.encode({**document, **change}))
    with pytest.raises(Impossible) as refusal:
        record.read_record(tmp_path / record.FILE)
    assert why in refusal.value.why
    assert refusal.value.fix


def test_a_record_that_is_not_there(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as refusal:
        record.read_record(tmp_path / "nowhere.json")
    assert refusal.value == snapshot


@pytest.mark.parametrize("samples", [(), (1.0, float("nan")), (float("inf"),)])
def test_a_series_has_numbers(samples: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="samples of a "):
        Series(name="a", unit="s", better="lower", samples=samples)


def test_two_series_of_a_record_differ_in_name_or_labels() -> None:
    one = Series(name="a", unit="s", better="lower", samples=(1.0,), labels={"size": 1})
    two = replace(one, labels={"size": 2})
    assert len(replace(made_up({}), series=(one, two)).series) == 2
    with pytest.raises(ValueError, match="same name and labels"):
        replace(made_up({}), series=(one, one))


def test_this_machine_can_be_looked_at() -> None:
    found = environment_here("cpu").ended()
    assert found.cores >= 1
    assert found.devices == ()
    assert found.torch is not None
    for busy in (found.busy_before_cores, found.busy_after_cores):
        assert busy is not None
        assert busy >= 0


def test_differences_are_named(snapshot: SnapshotAssertion) -> None:
    other = replace(ENVIRONMENT, torch="2.12.1", devices=("A100", "A100"), memory_bytes=None)
    devices, memory, torch = environment_differences(ENVIRONMENT, other)
    assert "A100, A100" in devices
    assert "64.0 GiB" in memory
    assert "2.12.1" in torch
    assert [devices, memory, torch] == snapshot
    assert environment_differences(ENVIRONMENT, ENVIRONMENT) == []


def test_a_load_is_named_only_if_it_matters(snapshot: SnapshotAssertion) -> None:
    assert environment_differences(ENVIRONMENT, replace(ENVIRONMENT, busy_after_cores=0.4)) == []
    (load,) = environment_differences(ENVIRONMENT, replace(ENVIRONMENT, busy_after_cores=3.0))
    assert "3.0 cores" in load
    assert load == snapshot


def test_a_busy_machine_is_a_warning(snapshot: SnapshotAssertion) -> None:
    assert disturbance(ENVIRONMENT) is None
    unknown = replace(ENVIRONMENT, busy_before_cores=None, busy_after_cores=None)
    assert disturbance(unknown) is None
    found = disturbance(replace(ENVIRONMENT, busy_before_cores=3.04))
    assert found is not None
    assert found == snapshot
