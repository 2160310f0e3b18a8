"""The example script runs as its readers run it."""

import re
from pathlib import Path

import pytest

from ranks.conftest import Torchrun

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"


@pytest.mark.nightly
def test_it_learns_on_two_ranks_and_goes_on_from_its_checkpoint(
    torchrun: Torchrun, tmp_path: Path
) -> None:
    first = torchrun(str(EXAMPLE), "--epochs", "2", "--samples", "4096")
    assert first.code == 0, first.err
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+) ranks 2", first.out)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    second = torchrun(str(EXAMPLE), "--epochs", "3", "--samples", "4096")
    assert second.code == 0, second.err
    assert second.out.splitlines()[0] == "resuming at epoch 2"
    (loss,) = re.findall(r"epoch 2 loss (\d\.\d+) ranks 2", second.out)
    assert float(loss) < losses[1]


def test_it_knows_nothing_of_us() -> None:
    assert "muster" not in EXAMPLE.read_text()
