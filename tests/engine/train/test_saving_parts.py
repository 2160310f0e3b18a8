"""Saving, part by part: what a state becomes on its way to a file and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_up_checkpoints import save
from patience import GIVE_UP_S
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.checkpoints.store import open_store
from torchmuster.errors import MusterError
from torchmuster.train.checkpointing import checkpointer
from torchmuster.train.checkpointing.checkpointer import Checkpointer
from torchmuster.train.checkpointing.matching import never_stepped
from torchmuster.train.checkpointing.state_tree import flatten, tied_tensors, unflatten
from torchmuster.train.world import join_world

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
    assert tied_tensors(tensors) == {"c": "a"}


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


def test_a_save_is_a_copy_of_every_dtype_and_layout(tmp_path: Path) -> None:
    numbers = torch.arange(48, dtype=torch.uint8).remainder(2)
    model = {str(dtype): numbers.view(dtype).clone() for dtype in checkpointer._DTYPES}
    model["across"] = torch.arange(6.0).view(2, 3).t()
    model["part"] = torch.arange(9.0)[3:6]
    model["number"], model["empty"] = torch.tensor(0.5), torch.ones(0, 4)
    expected = {name: tensor.clone() for name, tensor in model.items()}
    with join_world("cpu"), Checkpointer(tmp_path) as saver:
        saver.save({"model": model}, 1)
        for tensor in model.values():
            tensor.zero_()
        report = saver.wait()
        assert report is not None
        assert report.problem is None
        loaded = saver.load({"model": model})
    assert loaded is not None
    for name, tensor in model.items():
        assert (
            tensor.flatten().view(torch.uint8).equal(expected[name].flatten().view(torch.uint8))
        ), name


def test_a_save_is_committed_without_another_call(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with join_world("cpu"), Checkpointer(store) as saver:
        saver.save({"model": {"weight": torch.ones(3)}}, 1)
        assert saver._thread is not None
        saver._thread.join(GIVE_UP_S)
        assert [manifest.step for manifest in committed_manifests(store)] == [1]


def test_one_rank_checks_every_file_that_two_wrote(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    newest = save(store, 1)
    first = tmp_path / newest.name / min(newest.files)
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    with join_world("cpu"), pytest.raises(MusterError) as refused:
        Checkpointer(store).load({})
    assert first.name in refused.value.why


def test_no_reader_that_unpickles_is_used() -> None:
    """DCP's own readers run pickle.load on .metadata, and torch.load on what is no tensor."""
    package = Path(checkpointer.__file__).parents[2]
    saving = [
        *(package / "train" / "checkpointing").glob("*.py"),
        *package.glob("checkpoints/*.py"),
    ]
    assert len(saving) > 10
    for path in saving:
        text = path.read_text()
        for reader in ("FileSystemReader", "FsspecReader", "import pickle\n", "weights_only=False"):
            assert reader not in text, path
