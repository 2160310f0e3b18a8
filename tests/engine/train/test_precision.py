"""Which number type all ranks use, decided by what each rank's device supports."""

import pytest
import torch

from made_up_worlds import made_up_world
from torchmuster.errors import Impossible
from torchmuster.train import precision
from torchmuster.train.precision import choose_precision

pytestmark = pytest.mark.engine

WORLD = made_up_world()


@pytest.fixture
def of_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(precision, "all_gather_object", lambda *_: request.param)


@pytest.mark.parametrize(
    ("of_ranks", "name"),
    [
        (["bf16", "bf16"], "bf16"),
        (["bf16", "bf16", "fp16"], "fp16"),
        (["fp16", "bf16", "fp32"], "fp32"),
        (["cpu", "cpu"], "fp32"),
        (["bf16", "cpu"], "fp32"),
    ],
    indirect=["of_ranks"],
)
@pytest.mark.usefixtures("of_ranks")
def test_the_weakest_device_decides(name: str) -> None:
    choice = choose_precision("auto", WORLD)
    assert choice.value.name == name
    assert choice.reason.startswith(f"{name}: ")
    assert choice.value.needs_scaler == (name == "fp16")


@pytest.mark.parametrize("of_ranks", [["bf16", "fp16"]], indirect=True)
@pytest.mark.usefixtures("of_ranks")
def test_bf16_is_refused_where_a_gpu_lacks_it() -> None:
    with pytest.raises(Impossible, match="rank 1's GPU does not support bf16"):
        choose_precision("bf16", WORLD)
    assert choose_precision("fp32", WORLD).reason == "fp32: requested"


def test_a_cpu_computes_in_the_requested_type() -> None:
    with pytest.raises(Impossible, match="'half'"):
        choose_precision("half", WORLD)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with choose_precision(name, WORLD).value.autocast(WORLD.device):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
