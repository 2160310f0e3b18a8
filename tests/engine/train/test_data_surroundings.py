"""What a loader needs around it: cores to read with, batches on the device."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils.data import TensorDataset

from made_up_worlds import made_up_world
from torchmuster.train.data.loader import BatchLoader
from torchmuster.train.data.pytree import move_to_device, tensors_in

pytestmark = pytest.mark.engine


Pair = namedtuple("Pair", ["first", "second"])


class Knowing:
    """Moves itself, as BatchEncoding and graphs do."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def to(self, device: torch.device) -> "Knowing":
        return Knowing(str(device))


def test_whatever_a_batch_is_made_of_arrives_on_the_device() -> None:
    """The meta device stands in for an accelerator: tensors there have no values."""
    meta = torch.device("meta")
    one = torch.zeros(2)
    batch = {
        "list": [one, "text"],
        "pair": Pair(one, 3),
        "tuple": (one, None, OrderedDict(deep=one)),
        "packed": torch.nn.utils.rnn.pack_sequence([one, one]),
    }
    moved = move_to_device(batch, meta)
    assert moved.pop("packed").data.device == meta
    assert [tensor.device for tensor in tensors_in(moved)] == [meta] * 4
    assert len(list(tensors_in(batch))) == 6  # two of them in what was packed
    assert moved["list"][1] == "text"
    assert (type(moved["pair"]), moved["pair"].second) == (Pair, 3)
    assert moved["tuple"][1] is None
    assert move_to_device([Knowing()], meta)[0].device == meta
    device_world = dataclasses.replace(made_up_world(), device=meta)
    loader = BatchLoader(TensorDataset(torch.zeros(4, 2)), device_world, global_batch_size=4)
    (micro,) = next(loader.epoch(0))
    assert micro.batch[0].device == meta
