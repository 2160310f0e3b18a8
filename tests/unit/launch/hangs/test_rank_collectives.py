"""Which flight recorders are read in a rank, for every way in which torch offers them."""

import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from torchmuster.launch.rank import collectives


def entry(group: str, number: int, operation: str, *, done: bool = False) -> dict[str, object]:
    return {
        "process_group": [group, "undefined"],
        "collective_seq_id": number,
        "profiling_name": operation,
        "retired": done,
    }


def dump_of(*entries: dict[str, object]) -> bytes:
    return json.dumps({"entries": entries}).encode()


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a process group of these backends, in a torch with these recorders."""

    def make(backends: str, **recorders: Callable[..., bytes]) -> None:
        world = SimpleNamespace(pg_backend_config={"group": backends}, pg_names={"group": "0"})
        modules = {
            "torch.distributed": SimpleNamespace(is_initialized=lambda: True),
            "torch.distributed.distributed_c10d": SimpleNamespace(_world=world),
            "torch._C._distributed_c10d": SimpleNamespace(**recorders),
        }
        for name, module in modules.items():
            stand_in = ModuleType(name)
            vars(stand_in).update(vars(module))
            monkeypatch.setitem(sys.modules, name, stand_in)

    return make


def dump_by_backend(dumps: dict[str, bytes]) -> Callable[..., bytes]:
    """Return the function of torch 2.15, which has a recorder for each backend."""

    def dump(backend: str = "gloo", **_: bool) -> bytes:
        return dumps.get(backend, dump_of())

    dump.__doc__ = "_dump_fr_trace_json(includeCollectives, onlyActive, backend: str) -> bytes"
    return dump


def waits() -> list[tuple[str, int, str]]:
    progress = collectives.read_progress(main_waits_for_thread=False)
    return [(wait["group"], wait["number"], wait["operation"]) for wait in progress.waits]


@pytest.mark.parametrize("recorder", ["nccl", "nccl2"])
def test_the_recorder_of_each_backend_is_asked_for_by_name(
    torch_with: Callable[..., None], recorder: str
) -> None:
    dumps = {recorder: dump_of(entry("0", 7, f"{recorder}:all_reduce"))}
    torch_with(
        "cpu:gloo,cuda:nccl",
        _dump_fr_trace_json=dump_by_backend(dumps),
        _dump_nccl_trace_json=lambda **_: dump_of(),  # the recorder of the class that is not used
    )
    assert waits() == [("0", 7, "all_reduce")]
    assert json.loads(collectives.dump_entries())["entries"]


def test_the_two_recorders_of_a_mixed_group_count_separately(
    torch_with: Callable[..., None],
) -> None:
    dumps = {
        "nccl2": dump_of(entry("0", 7, "nccl2:all_reduce")),
        "gloo": dump_of(entry("0", 3, "gloo:barrier")),
    }
    torch_with("cpu:gloo,cuda:nccl", _dump_fr_trace_json=dump_by_backend(dumps))
    assert waits() == [("0", 7, "all_reduce"), ("0 (gloo)", 3, "barrier")]


def test_before_torch_2_15_there_are_two_recorders(torch_with: Callable[..., None]) -> None:
    torch_with(
        "cuda:nccl",
        _dump_nccl_trace_json=lambda **_: dump_of(entry("0", 4, "nccl:broadcast")),
        _dump_fr_trace_json=lambda **_: dump_of(entry("1", 2, "gloo:barrier", done=True)),
    )
    assert waits() == [("0", 4, "broadcast")]
    assert collectives.read_progress(main_waits_for_thread=False).begun == {"0": 4, "1": 2}


def test_without_a_process_group_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    assert collectives.read_status() == collectives.CollectiveStatus()
    assert collectives.joined_groups() == []


@pytest.mark.parametrize(
    ("status", "count"),
    [
        (b"", None),
        (b'{"pg_config": {}, "pg_status": {}}', None),  # the recorder is switched off
        (b'{"pg_config": {"": {}}, "pg_status": {}}', 0),
        (b'{"pg_config": {"": {}}, "pg_status": {"0": {"last_enqueued_collective": "2"}}}', 2),
    ],
)
def test_collectives_are_counted_if_they_are_visible(
    torch_with: Callable[..., None], status: bytes, count: int | None
) -> None:
    torch_with("cpu:gloo", _dump_fr_trace_json=lambda **_: status)
    assert collectives.read_status().count == count
