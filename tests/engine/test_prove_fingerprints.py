"""Hashes of tensors, batches and copies of weights."""

import copy

import pytest
import torch
from torch import nn

from torchmuster.prove.probes import fingerprints

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_hash_depends_on_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    changed = tensor.clone()
    changed[0, 0] = 1
    hashed = fingerprints.tensor_hash(tensor)
    assert fingerprints.tensor_hash(tensor.clone()) == hashed
    assert fingerprints.tensor_hash(changed) != hashed
    assert fingerprints.tensor_hash(tensor, begun=1) != hashed


def test_a_view_is_hashed_by_its_values() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    assert fingerprints.tensor_hash(tensor.t()) == fingerprints.tensor_hash(tensor.t().contiguous())
    assert fingerprints.tensor_hash(tensor.t()) != fingerprints.tensor_hash(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_hash_of_a_device_depends_on_values_and_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(100).to(dtype)
    swapped = tensor.clone()
    swapped[[3, 7]] = tensor[[7, 3]]
    hashed = fingerprints.hash_on_device(tensor)
    assert fingerprints.hash_on_device(tensor.clone()) == hashed
    assert fingerprints.hash_on_device(swapped) != hashed


def test_samples_do_not_depend_on_their_batch() -> None:
    rows = torch.arange(12).reshape(3, 4)
    whole = fingerprints.sample_hashes([("x", rows)])
    assert fingerprints.sample_hashes([("x", rows[1:])]) == whole[1:]
    assert len(set(whole)) == 3


def test_averages_of_the_weights_are_found() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    parameters = list(model.parameters())
    average = copy.deepcopy(model)
    named = {name: value.detach().clone() for name, value in model.named_parameters()}
    found = fingerprints.find_copies(parameters)
    assert any(one is average for one in found)
    assert any(one is named for one in found)
    assert not any(one is model for one in found)
    before = [fingerprints.copy_hash(average, 4), fingerprints.copy_hash(named, 4)]
    assert before[0] == before[1]
    with torch.no_grad():
        next(average.parameters()).add_(1)
    assert fingerprints.copy_hash(average, 4) != before[0]
