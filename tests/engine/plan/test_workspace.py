"""What operations take for a moment on a CPU is known without memory for their tensors."""

from typing import Any

import pytest
import torch

from torchmuster.plan.probes import operations
from torchmuster.plan.probes.operations import workspace_bytes
from torchmuster.plan.torch_private import FakeTensorMode

pytestmark = pytest.mark.engine

_aten = torch.ops.aten
FORWARD, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
KIB = 1024


def _forward(samples: int, *, kernel: int = 3) -> tuple[Any, ...]:
    inputs = torch.empty(samples, 64, 16, 16)
    weight = torch.empty(64, 64, kernel, kernel)
    around = kernel // 2
    return (inputs, weight, None, [1, 1], [around, around], [1, 1], False, [0, 0], 1)


def _backward(samples: int) -> tuple[Any, ...]:
    inputs, weight, _, *rest = _forward(samples)
    gradient = torch.empty(samples, 64, 16, 16)
    return (gradient, inputs, weight, None, *rest, [True, True, False])


def _taken(operation: Any, args: tuple[Any, ...], *, flops: int = 1) -> int:
    made = operation(*args)
    return workspace_bytes(operation, args, {}, flops=flops, made=made)


def test_copies_of_inputs_and_weights_are_counted() -> None:
    with FakeTensorMode():
        taken = _taken(FORWARD, _forward(4))
        taken_back = _taken(BACKWARD, _backward(4))
    # Which copies are made depends on the processor; that some are made does not, nor that they are few.
    one_of_the_tensors = 4 * 64 * 16 * 16 * 4
    assert 64 * KIB <= taken <= 3 * one_of_the_tensors
    assert 64 * KIB <= taken_back <= 4 * one_of_the_tensors


def test_large_ones_are_computed_with_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        samples: int = args[0].shape[0]
        assert args[1].shape[0] == 64, "the weight stays"
        seen.append(samples)
        return 100 * samples + 7

    monkeypatch.setattr(operations, "_computed", noted)
    with FakeTensorMode():
        assert _taken(FORWARD, _forward(50)) == 5007
        assert _taken(FORWARD, _forward(50), flops=5 * operations._MOST_FLOPS) == 5007
        monkeypatch.setattr(operations, "_LARGEST_BYTES", 1)
        assert _taken(FORWARD, _forward(50)) == 5007
    assert seen == [50, 10, 5, 2, 1]


def test_products_of_16_bits_may_copy_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_computed", lambda *_: 5)
    halves = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, 4, dtype=torch.bfloat16)
    whole = torch.empty(8, 16), torch.empty(16, 4)
    assert _taken(_aten.mm.default, whole) == 0
    assert _taken(_aten.mm.default, halves) == 5
    too_large = operations._MOST_FLOPS + 1
    assert _taken(_aten.mm.default, halves, flops=too_large) == 16 * 4 * 2
    assert _taken(_aten.addmm.default, (halves[1][0], *halves), flops=too_large) == 16 * 4 * 2


def test_what_has_another_type_is_copied_first() -> None:
    half, whole = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(8, 16)
    assert _taken(_aten.add.Tensor, (half, whole)) == 8 * 16 * 4
    assert _taken(_aten.add.Tensor, (whole, whole)) == 0
    assert _taken(_aten.mul.Tensor, (whole, torch.tensor(2, dtype=torch.bfloat16))) == 0


def test_attention_has_buffers() -> None:
    attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
    with FakeTensorMode():
        rows = [torch.empty(2, 4, 64, 16) for _ in range(3)]
        assert _taken(attention, (*rows,)) > 0


def test_shapes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        first = _taken(FORWARD, _forward(3))
        monkeypatch.setattr(operations, "profile", None)  # a second look would fail
        assert _taken(FORWARD, _forward(3)) == first
        with pytest.raises(TypeError):
            _taken(FORWARD, _forward(3, kernel=5))
