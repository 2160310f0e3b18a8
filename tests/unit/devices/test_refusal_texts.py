"""The classic failures around GPU ids, each with the sentence that answers it."""

from typing import Any

import pytest

from device_strategies import claim, gpu, integrated, node, split
from torchmuster.devices.choose import choose
from torchmuster.devices.identify import find
from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import GpuId, Request
from torchmuster.devices.visibility import variables_for
from torchmuster.errors import ExitCode, MusterError, NoSuchDevice, TooFewDevices
from torchmuster.units import GiB

FOUR = node(*(gpu(index) for index in range(4)))
SPLIT = node(*split(gpu(0), 40 * GiB, 20 * GiB), gpu(1))
UUID = gpu(2).uuid


def pick(machine: Node, cuda: str | None = None, **asked: Any) -> tuple[Device, ...]:
    environment = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    return choose(machine, Request(**asked), environment=environment).value


def refusal(machine: Node, cuda: str | None = None, **asked: Any) -> MusterError:
    with pytest.raises(MusterError) as caught:
        pick(machine, cuda, **asked)
    return caught.value


# More processes than GPUs.


def test_more_gpus_than_exist_is_one_sentence_and_exit_code_2() -> None:
    error = refusal(FOUR, count=8)
    assert isinstance(error, TooFewDevices)
    assert error.exit_code is ExitCode.IMPOSSIBLE
    assert str(error) == (
        "asked for 8 GPUs: 4 can be had here\nbox has 4 GPUs\nmuster gpus pick --num 4"
    )


def test_more_gpus_than_are_visible_names_the_variable() -> None:
    assert str(refusal(FOUR, "1", count=2)) == (
        "asked for 2 GPUs: 1 can be had here\n"
        "box has 1 GPU visible (CUDA_VISIBLE_DEVICES=1)\n"
        "muster gpus pick --num 1"
    )


def test_more_gpus_than_are_named() -> None:
    assert str(refusal(FOUR, ids=(0, 2), count=3)) == (
        "asked for 3 of GPUs 0, 2: 2 can be had here\n"
        "box has 4 GPUs\n"
        "muster gpus pick --gpu-ids 0 2 --num 2\n"
        "muster gpus pick --num 3"
    )


# nvidia-smi's number is not torch's.


def test_a_number_is_resolved_to_the_uuid_that_means_the_same_everywhere() -> None:
    (device,) = pick(FOUR, ids=(2,))
    assert variables_for([device]) == {"CUDA_VISIBLE_DEVICES": UUID}


@pytest.mark.parametrize("spelling", [2, "2", " 2 ", UUID, UUID[:9]])
def test_numbers_uuids_and_beginnings_name_the_same_gpu(spelling: GpuId) -> None:
    assert find(FOUR, spelling, {}).uuid == UUID


def test_a_number_keeps_its_meaning_when_others_are_hidden() -> None:
    assert pick(FOUR, "3,2", ids=(2,))[0].uuid == UUID


# UUIDs and MIG names.


@pytest.mark.parametrize("spelling", ["0:1", gpu(0).uuid, 0])
def test_slices_have_numbers_and_their_gpu_is_not_one_of_them(spelling: GpuId) -> None:
    if spelling == "0:1":
        assert find(SPLIT, spelling, {}).number == "0:1"
        return
    error = refusal(SPLIT, ids=(spelling,))
    assert isinstance(error, NoSuchDevice)
    assert str(error) == (
        "GPU 0 is split into MIG slices and cannot be used as a whole\n"
        "its slices are: 0:0, 0:1\n"
        "name a slice: --gpu-ids 0:0"
    )


def test_mig_uuids_and_their_beginnings_are_accepted() -> None:
    one = SPLIT.accelerators[2]
    assert one.uuid.startswith("MIG-")
    assert pick(SPLIT, ids=(one.uuid,)) == pick(SPLIT, ids=(one.uuid[:10],)) == (one,)


def test_a_gpu_in_mig_mode_without_slices_yet() -> None:
    error = refusal(node(*split(gpu(0))), ids=(0,))
    assert error.why == "its slices are: none yet"
    assert error.fix == "sudo nvidia-smi mig -cgi … -C"


def test_a_split_gpu_whose_number_is_made_visible_still_has_its_slice() -> None:
    error = refusal(SPLIT, "0", ids=(0,))
    assert error.why == "its slices are: 0:0"
    assert pick(SPLIT, "0", count=1)[0].number == "0:0"


@pytest.mark.parametrize("ids", [("0:0", "0:1"), ("0:0", "1")])
def test_several_slices_cannot_make_a_set(ids: tuple[str, ...]) -> None:
    assert str(refusal(SPLIT, ids=ids)) == (
        f"asked for GPUs {', '.join(ids)}: they cannot be used together\n"
        "a CUDA process sees one MIG slice at most, and no GPU beside it\n"
        "name one slice, or whole GPUs only"
    )


def test_one_of_several_slices_can_be_chosen() -> None:
    assert [one.number for one in pick(SPLIT, ids=("0:1", "0:0"), count=1)] == ["0:0"]


def test_an_ambiguous_beginning_lists_what_it_could_be() -> None:
    error = refusal(FOUR, ids=("GPU-",))
    assert isinstance(error, NoSuchDevice)
    assert str(error) == (
        "GPU id 'GPU-' is not unique\n"
        f"it could be: {', '.join(gpu(index).uuid for index in range(4))}\n"
        "give more of the UUID"
    )


@pytest.mark.parametrize("unknown", ["7", "GPU-feed", "0:0", "-1", "cuda"])
def test_an_unknown_id_lists_the_numbers_there_are(unknown: str) -> None:
    error = refusal(FOUR, ids=(unknown,))
    assert isinstance(error, NoSuchDevice)
    assert error.exit_code is ExitCode.IMPOSSIBLE
    assert str(error) == (
        f"there is no GPU {unknown} on box\n"
        "the visible GPUs are: 0, 1, 2, 3\n"
        "muster gpus --uuids  # shows the numbers and UUIDs to use"
    )


def test_an_unknown_id_where_no_gpu_is_visible() -> None:
    assert str(refusal(FOUR, "", ids=(9,))) == (
        "there is no GPU 9 on box\nno GPU is visible here\nrun on the CPU: start the program without picking GPUs"
    )


def test_the_number_of_an_integrated_gpu_is_not_offered() -> None:
    beside = node(gpu(1), integrated())
    assert refusal(beside, ids=(0,)).why == "the visible GPUs are: 1"


@pytest.mark.parametrize(("cuda", "shown"), [("0,1", "0,1"), ("", '""')])
@pytest.mark.parametrize("spelling", [2, UUID])
def test_a_hidden_gpu_is_refused_with_the_variable_that_hides_it(
    cuda: str, shown: str, spelling: GpuId
) -> None:
    error = refusal(FOUR, cuda, ids=(spelling,))
    assert isinstance(error, NoSuchDevice)
    assert str(error) == (
        "GPU 2 is hidden from this process\n"
        f"CUDA_VISIBLE_DEVICES={shown} is set in the environment\n"
        "choose among the visible GPUs, or unset the variable"
    )


def test_a_split_gpu_hidden_with_its_slices_is_hidden() -> None:
    error = refusal(SPLIT, "1", ids=(0,))
    assert error.what == "GPU 0 is hidden from this process"


@pytest.mark.parametrize("ids", [(2, 2), (2, UUID), ("2", UUID[:9])])
def test_the_same_gpu_twice(ids: tuple[GpuId, ...]) -> None:
    error = refusal(FOUR, ids=ids)
    assert isinstance(error, NoSuchDevice)
    assert str(error) == (
        f"asked for GPUs {', '.join(map(str, ids))}: one GPU is named twice\n"
        "each process needs a GPU of its own\n"
        "remove the repetition"
    )


def test_a_claimed_gpu_says_by_whom() -> None:
    with pytest.raises(MusterError) as caught:
        choose(FOUR, Request(ids=(2,)), environment={}, claims={UUID: claim()})
    assert str(caught.value) == (
        "asked for GPU 2: none can be had now\n"
        "box has 4 GPUs; GPU 2 is claimed by carol (pid 77, python train.py)\n"
        "muster gpus pick --gpu-ids 2 --wait\n"
        "muster gpus pick --num 1"
    )
