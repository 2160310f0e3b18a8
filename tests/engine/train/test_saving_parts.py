"""Saving, part by part: what a state becomes on its way to a file and back."""

import dataclasses
import json
import math
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from fake_accelerator import FakeAccelerator
from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.store import open_store
from torchmuster.errors import Impossible
from torchmuster.train.checkpointing.checkpointer import (
    Checkpointer,
    Staging,
    _changing,
    pinned_blocks,
)
from torchmuster.train.checkpointing.flatten import flatten, shared_tensors, unflatten
from torchmuster.train.checkpointing.loading import never_stepped
from torchmuster.train.checkpointing.pace import Pace
from torchmuster.train.checkpointing.storage import DTYPES, byte_pieces
from torchmuster.train.world import join_world
from torchmuster.units import MiB

pytestmark = pytest.mark.engine

_PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
)
_KEYS = st.text(max_size=4) | st.sampled_from(["__tuple__", "__tensor__", "__pairs__", "__float__"])
_TREES = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(_KEYS, _TREES, max_size=3))
def test_whatever_has_no_tensors_comes_back_as_it_was_through_json(state: dict[str, Any]) -> None:
    rest, tensors = flatten(state)
    assert tensors == {}
    assert repr(unflatten(json.loads(json.dumps(rest, allow_nan=False)), {})) == repr(state)


def test_tensors_are_named_by_the_way_to_them() -> None:
    weight = torch.ones(2)
    state = {
        "model": {"layers.0.weight": weight},
        "optimizer": {"param_groups": [{"lr": torch.tensor(0.1), "betas": (0.9, 0.999)}]},
        "progress": {"loss": math.nan, "milestones": Counter({3: 1})},
    }
    rest, tensors = flatten(state)
    assert list(tensors) == ["model.layers.0.weight", "optimizer.param_groups.0.lr"]
    again = unflatten(json.loads(json.dumps(rest)), tensors)
    assert again["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert again["progress"]["milestones"] == {3: 1}
    assert math.isnan(again["progress"]["loss"])
    assert again["model"]["layers.0.weight"].data_ptr() == weight.data_ptr()


def test_two_ways_with_one_name_are_refused(snapshot: SnapshotAssertion) -> None:
    state = {"model": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}}
    with pytest.raises(Impossible, match=r"model\.a\.b") as refused:
        flatten(state)
    assert refused.value == snapshot


def test_tied_tensors_are_found_and_others_are_not() -> None:
    one, two = torch.ones(2, 3), torch.ones(2, 3)
    tensors = {
        "a": one,
        "b": two,
        "c": one.detach(),
        "d": one[0],
        "e": torch.ones(0),
        "f": torch.ones(0),
    }
    assert shared_tensors(tensors) == {"c": "a"}


@pytest.mark.parametrize("word", DTYPES)
def test_bytes_are_those_of_the_tensor_for_every_type(word: str) -> None:
    whole = torch.arange(48, dtype=torch.uint8).remainder(2).view(DTYPES[word]).view(2, -1)
    part = whole[:, : whole.shape[1] // 2]  # not contiguous
    wanted = bytes(part.contiguous().view(torch.uint8).flatten().tolist())
    assert b"".join(bytes(one) for one in byte_pieces(part)) == wanted
    staging = Staging(torch.device("cpu"))
    staged = staging.take([part, torch.ones(0), torch.tensor(True)], None)
    part.zero_()  # what was taken is not what it is now
    assert b"".join(bytes(one) for one in staged) == wanted + b"\x01"


@given(st.integers(0, 2**36))
def test_pinned_memory_takes_what_was_asked_for(size_bytes: int) -> None:
    blocks = pinned_blocks(size_bytes)
    assert all(block.bit_count() == 1 for block in blocks)  # torch rounds up to a power of two
    assert size_bytes <= sum(blocks) < size_bytes + MiB


def test_staging_on_a_gpu_pins_once_and_gives_the_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = FakeAccelerator().install(monkeypatch)
    staging = Staging(torch.device("cuda", 3))
    staging.reserve(5 * MiB)
    assert gpus.pinned == [4 * MiB, MiB]
    large = torch.arange(3 * MiB, dtype=torch.int16)  # 6 MiB: in three blocks
    tensors = [torch.ones(3, dtype=torch.bool), large.view(3, MiB).t(), torch.zeros(0)]
    wanted = b"".join(bytes(piece) for one in tensors for piece in byte_pieces(one))
    for _ in range(2):
        assert b"".join(bytes(one) for one in staging.take(tensors, staging.ready())) == wanted
    assert gpus.pinned == [4 * MiB, MiB, 2 * MiB]
    assert [call.name for call in gpus.calls].count("Stream") == 1
    staging.release()
    assert gpus.calls[-1].name == "empty_host_cache"


def test_memory_for_saves_is_pinned_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with join_world("cpu") as world:
        gpus = FakeAccelerator().install(monkeypatch)
        gpu = dataclasses.replace(world, device=torch.device("cuda", 3))
        with Checkpointer(open_store(str(tmp_path)), gpu, strategy="single") as checkpointer:
            assert checkpointer.check_room({"model": {"weight": torch.ones(MiB)}}) == []
            assert gpus.pinned == [4 * MiB]
    assert gpus.calls[-1].name == "empty_host_cache"


def test_copies_on_the_device_are_released_before_files_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    clone, create = torch.Tensor.clone, FolderStore.create

    def cloned(tensor: torch.Tensor) -> torch.Tensor:
        copy = clone(tensor)
        copies.append(weakref.ref(copy))
        return copy

    def created(store: FolderStore, name: str, file: str) -> Any:
        alive.extend(one() is not None for one in copies)
        return create(store, name, file)

    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    monkeypatch.setattr(FolderStore, "create", created)
    state = {"model": {"weight": torch.ones(2), "mean": torch.full((3,), 7.0)}}
    store = open_store(str(tmp_path))
    with (
        join_world("cpu") as world,
        Checkpointer(store, world, strategy="single") as checkpointer,
    ):
        checkpointer.save(state, step=1, own={})
        report = checkpointer.wait()
        assert report is not None
        assert report.problem == ""
        loaded = checkpointer.load({"model": {"weight": torch.zeros(2), "mean": torch.zeros(3)}})
    assert len(copies) >= 1
    assert alive
    assert not any(alive)
    assert loaded is not None
    assert loaded.state["model"]["mean"].tolist() == [7.0, 7.0, 7.0]


def test_a_checkpointer_needs_the_group_first() -> None:
    with pytest.raises(Impossible, match="created before the process group"):
        Checkpointer(None, None, strategy="single")  # type: ignore[arg-type]


def test_all_that_the_optimizer_does_not_train_is_taken_at_once() -> None:
    trained, frozen, running = torch.ones(2), torch.ones(2), torch.ones(2)
    model = {"a": trained, "teacher": frozen, "mean": running, "tied": trained.detach()}
    optimizer = {"state": {"a": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["a"]}]}
    state = {"model": model, "optimizer": optimizer}
    tensors = flatten(state)[1]
    assert _changing(state, tensors, None) == ["model.teacher", "model.mean"]
    assert _changing(state, tensors, ["mean"]) == ["model.mean"]


def test_only_parameters_of_the_same_optimizer_may_be_without_a_state() -> None:
    def optimizer(stepped: tuple[str, ...], params: tuple[str, ...], **options: Any) -> Any:
        group = {"params": list(params), **options}
        return {"optimizer": {"state": {name: {} for name in stepped}, "param_groups": [group]}}

    both, now = ("a", "b"), optimizer(("a", "b"), ("a", "b"), lr=0.1, betas=0.9)
    assert never_stepped(optimizer(both, both), now) == ()
    assert never_stepped(optimizer(("a",), both), now) == ("optimizer.state.b.",)
    assert never_stepped(optimizer(("a",), ("a",)), now) == ()  # b was frozen
    all_of_it = ("optimizer.state.a.", "optimizer.state.b.")
    assert never_stepped(optimizer((), both, lr=0.2, betas=0.9), now) == all_of_it
    assert never_stepped(optimizer((), both, lr=0.1, momentum=0.9), now) == ()  # another kind
    assert never_stepped({}, now) == ()


@pytest.mark.alone
def test_who_writes_beside_a_training_on_the_same_cores_takes_a_small_share_until_waited_for() -> (
    None
):
    pace = Pace()

    def rests_s() -> float:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.02:
            pass
        rested = time.perf_counter()
        pace.rest()
        return time.perf_counter() - rested

    pace.rest()
    assert rests_s() > 0.2
    pace.hurry()
    assert min(rests_s() for _ in range(10)) < 0.1
