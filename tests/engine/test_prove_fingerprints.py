"""Hashes of tensors, batches and copies of weights."""

import copy

import pytest
import torch
from torch import nn

from torchmuster.prove.probes import fingerprints
from torchmuster.prove.probes.weight_copies import WeightCopies

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
    copies = WeightCopies()
    first = copies.hashes(parameters, search=True)
    equal = fingerprints.tensors_hash(parameters)
    assert first.count(equal) == 2  # not the model itself
    with torch.no_grad():
        next(average.parameters()).add_(1)
    second = copies.hashes(parameters, search=False)
    assert second.count(equal) == 1
    assert len(named) == 4


def test_an_average_that_the_script_replaces_is_found_again() -> None:
    model = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 3))
    parameters = list(model.parameters())
    copies = WeightCopies()
    average = {name: value.detach() + 1 for name, value in model.named_parameters()}
    copies.hashes(parameters, search=True)
    average = {name: value + 1 for name, value in average.items()}
    hashes = copies.hashes(parameters, search=False)
    assert fingerprints.tensors_hash(average.values()) in hashes
