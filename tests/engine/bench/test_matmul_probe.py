"""Products are computed in every number type, checked, left out where they take too long, and timed truly."""

from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from torchmuster import distributed
from torchmuster.bench.matmul import MatmulRequest, squares
from torchmuster.bench.probes import matmul
from torchmuster.bench.probes.matmul import linear_shapes
from torchmuster.errors import Impossible
from torchmuster.plan.job import Work

pytestmark = pytest.mark.engine

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Embedding(50, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 48), nn.Linear(48, 12)) for _ in range(3))
        self.unused = nn.Linear(12, 7)
        self.leave = nn.Linear(12, 50)

    def forward(self, input_ids):
        states = self.enter(input_ids)
        for block in self.blocks:
            states = states + block(states)
        return self.leave(states)


def make():
    return Model()


def without():
    return nn.Sequential(nn.Embedding(50, 50))
"""


def test_every_number_type_is_multiplied_and_compared_with_float64() -> None:
    found = matmul.time_products(
        MatmulRequest(device="cpu", shapes=squares((32, 48)), rounds=2, longest_s=None)
    )
    assert [(one.shape.rows, one.number_type) for one in found.products] == [
        (32, "float32"),
        (32, "bfloat16"),
        (48, "float32"),
        (48, "bfloat16"),
    ]
    assert all(one.right and len(one.call_s) == 2 and one.on_cpu for one in found.products)
    errors = {one.number_type: one.error for one in found.products}
    assert errors["float32"] is not None
    assert errors["float32"] < 1e-6
    assert errors["bfloat16"] is not None
    assert 1e-4 < errors["bfloat16"] < 1e-2
    assert set(found.missing_types) == {"tf32", "float16"}


def test_a_device_that_multiplies_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(left: torch.Tensor, right: torch.Tensor, number_type: str) -> torch.Tensor:
        product = left @ right
        product[-1, -1] += 100  # one number of the last row
        return product

    monkeypatch.setattr(matmul, "_multiply", nearly)
    found = matmul.time_products(MatmulRequest(device="cpu", shapes=squares((64,)), rounds=1))
    assert [one.right for one in found.products] == [False, False]


def test_what_would_take_too_long_is_left_out_with_how_long() -> None:
    found = matmul.time_products(
        MatmulRequest(device="cpu", shapes=squares((32, 512)), rounds=1, longest_s=1e-9)
    )
    first, large = found.products[0], found.products[2]
    assert first.call_s
    assert not first.left_out
    assert not large.call_s
    assert large.left_out.startswith("one product would take about ")


def test_the_shapes_of_a_model_are_those_of_its_forward(tmp_path: Path) -> None:
    (tmp_path / "shapes_of_model.py").write_text(MODEL)
    work = Work(
        build="shapes_of_model:make",
        loss="language_model",
        sequence_length=16,
        folder=str(tmp_path),
    )
    shapes = linear_shapes(work, micro_batch_size=2)
    # What the forward does not call is not among them.
    assert [(one.layer, one.name, one.times) for one in shapes] == [
        ("blocks.*.*", "32 x 12 x 48", 3),
        ("blocks.*.*", "32 x 48 x 12", 3),
        ("leave", "32 x 12 x 50", 1),
    ]


def test_a_model_without_linear_layers_is_refused(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "no_linear_layers.py").write_text(MODEL)
    work = Work(
        build="no_linear_layers:without",
        loss="cross_entropy",
        dataset="no_linear_layers_data:make",
        folder=str(tmp_path),
    )
    (tmp_path / "no_linear_layers_data.py").write_text(
        "import torch\n\n\ndef make():\n    return [(torch.tensor(3), torch.tensor(4))]\n"
    )
    with pytest.raises(Impossible, match=r"torch\.nn\.Linear") as refused:
        linear_shapes(work, micro_batch_size=2)
    assert refused.value == snapshot


def test_the_classic_function_says_how_fast_and_how_sure() -> None:
    found = distributed.benchmark_matmul("cpu", 64, iterations=3)
    assert found["size"] == 64
    assert found["tflops"] == pytest.approx(2 * 64**3 / found["seconds"] / 1e12)
    assert found["noise"] >= 0
    with pytest.raises(Impossible, match="size 0 or iterations 100"):
        distributed.benchmark_matmul("cpu", 0)
