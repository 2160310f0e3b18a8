"""Variables that are pulled from ranks: what comes back is what was there, and what is no data is refused."""

from typing import Any

import numpy
import pytest
import torch

from torchmuster.errors import Impossible
from torchmuster.notebook import values

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -7,
        float("inf"),
        "text – ü",
        b"\x00\xff",
        [1, [2, (3, "x")]],
        (),
        {"a": 1, 2: "b", None: (3, 4)},
    ],
    ids=repr,
)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    back = values.decode_value(values.encode_value("x", value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.float16),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2, requires_grad=True)),
    ],
    ids=str,
)
def test_tensors_come_back_with_type_and_shape(tensor: torch.Tensor) -> None:
    back: Any = values.decode_value(values.encode_value("x", {"t": tensor}))
    assert back["t"].dtype is tensor.dtype
    assert torch.equal(back["t"], tensor.detach())
    back["t"].zero_()  # its memory is its own


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype="<i4").reshape(2, 3).T,
        numpy.zeros((0, 2)),
        numpy.array(["a", "bcd"]),
        numpy.float64(0.5),
    ],
    ids=str,
)
def test_arrays_come_back_with_type_and_shape(array: Any) -> None:
    back: Any = values.decode_value(values.encode_value("x", array))
    assert numpy.array_equal(back, array)
    if isinstance(array, numpy.ndarray):
        assert back.dtype == array.dtype


def test_a_state_dict_comes_back() -> None:
    model = torch.nn.Linear(2, 1)
    back: Any = values.decode_value(values.encode_value("x", model.state_dict()))
    assert torch.equal(back["weight"], model.weight)


_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.nn.Linear(1, 1), "cannot pull x: it is a torch.nn.modules.linear.Linear"),
        ({"a": [print]}, "cannot pull x['a'][0]: it is a builtins.builtin_function"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (numpy.array([print]), "numpy.ndarray"),
        ({(1, 2): 3}, "cannot pull x: unsupported key (1, 2)"),
        (2**70, "cannot pull x"),
        (_CIRCLE, "cannot pull x"),
    ],
    ids=["module", "function", "sparse", "objects", "keys", "large", "circle"],
)
def test_what_is_no_data_is_refused_by_name(value: object, what: str) -> None:
    with pytest.raises(Impossible) as refused:
        values.encode_value("x", value)
    assert what in refused.value.what
    assert "torch tensors, numpy arrays" in refused.value.why
    assert "state_dict" in refused.value.fix
