"""What training does where a private name of torch is missing, or is used in an unusual way."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from torchmuster.diagnose.torch_private import collectives_begun
from torchmuster.train import torch_private
from torchmuster.train.strategies import gradients

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
HUGE = 3e38  # its square is not finite in float32


@pytest.mark.parametrize("check", ["torch's", "missing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_what_is_not_finite_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, check: str
) -> None:
    if check == "missing":
        monkeypatch.setattr(gradients, "non_finite_check", None)
    fine = [
        torch.full((3,), HUGE).to(dtype),
        torch.zeros(0, dtype=dtype),
        torch.ones((), dtype=dtype),
    ]
    assert not gradients.found_inf_in(fine, CPU)
    for bad in (float("inf"), -float("inf"), float("nan")):
        assert gradients.found_inf_in([*fine, torch.tensor([1.0, bad]).to(dtype)], CPU)


def test_what_is_not_finite_is_found_in_a_sparse_gradient() -> None:
    twice = torch.tensor([[0, 0]])
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        fine, bad = (
            torch.sparse_coo_tensor(twice, torch.tensor([1.0, value]), (3,))
            for value in (2.0, float("nan"))
        )
    assert not gradients.found_inf_in([fine], CPU)
    assert gradients.found_inf_in([bad], CPU)
    assert torch_private.sparse_values(fine).tolist() == [1.0, 2.0]  # not added up: no waiting


def test_a_sparse_tensor_without_the_private_method_is_coalesced() -> None:
    class Sparse:
        def coalesce(self) -> "Sparse":
            return self

        def values(self) -> str:
            return "values"

    sparse: Any = Sparse()
    assert torch_private.sparse_values(sparse) == "values"


def test_gradients_are_multiplied_one_by_one_without_foreach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch, "_foreach_mul_")
    tensors = [torch.ones(2), torch.full((1,), 3.0)]
    torch_private.multiply_all(tensors, 2.0)
    assert [one.tolist() for one in tensors] == [[2.0, 2.0], [6.0]]


def test_a_view_is_known_by_what_it_is_a_view_of() -> None:
    whole = torch.zeros(4)
    assert torch_private.base_of(whole) is whole
    assert torch_private.base_of(whole[1:]) is whole


@pytest.mark.parametrize("name", ["_get_ddp_logging_data", "_set_ddp_runtime_logging_sample_rate"])
def test_ddp_that_measures_nothing_is_not_asked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(DistributedDataParallel, name)
    model: Any = object.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    assert not torch_private.let_ddp_measure(model, every=10)


def test_a_loader_without_workers_has_none_to_stop() -> None:
    torch_private.stop_workers(DataLoader([1, 2]))  # type: ignore[arg-type]
    other: Any = object()
    torch_private.stop_workers(other)


def test_a_group_that_does_not_count_its_collectives() -> None:
    assert collectives_begun(object()) is None
