"""What training does where a private name of torch is missing, or is used in an unusual way."""

from typing import Any

import pytest
import torch

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
