"""The classic failures around GPU ids, each with the error that answers it."""

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from device_strategies import claim, gpu, integrated, node, split
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.identify import find_device
from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import DeviceRequest, GpuId
from torchmuster.devices.visibility import variables_for
from torchmuster.errors import ExitCode, MusterError, NoSuchDevice, TooFewDevices
from torchmuster.units import GiB

FOUR = node(*(gpu(index) for index in range(4)))
SPLIT = node(*split(gpu(0), 40 * GiB, 20 * GiB), gpu(1))
UUID = gpu(2).uuid


def pick(machine: Node, cuda: str | None = None, **asked: Any) -> tuple[Device, ...]:
    environment = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    return choose_devices(machine, DeviceRequest(**asked), environment=environment).value


def refusal(machine: Node, cuda: str | None = None, **asked: Any) -> MusterError:
    with pytest.raises(MusterError) as caught:
        pick(machine, cuda, **asked)
    return caught.value


# More processes than GPUs.


def test_more_gpus_than_exist_is_one_sentence_and_exit_code_2(snapshot: SnapshotAssertion) -> None:
    error = refusal(FOUR, count=8)
    assert isinstance(error, TooFewDevices)
    assert error.exit_code is ExitCode.IMPOSSIBLE
    assert error.fix == "muster gpus pick --num 4"
    assert error == snapshot


def test_more_gpus_than_are_visible_names_the_variable(snapshot: SnapshotAssertion) -> None:
    error = refusal(FOUR, "1", count=2)
    assert "CUDA_VISIBLE_DEVICES=1" in error.why
    assert error.fix == "muster gpus pick --num 1"
    assert error == snapshot


def test_more_gpus_than_are_named(snapshot: SnapshotAssertion) -> None:
    error = refusal(FOUR, ids=(0, 2), count=3)
    offered = ["muster gpus pick --gpu-ids 0 2 --num 2", "muster gpus pick --num 3"]
    assert error.fix.splitlines() == offered
    assert error == snapshot


# nvidia-smi's number is not torch's.


def test_a_number_is_resolved_to_the_uuid_that_means_the_same_everywhere() -> None:
    (device,) = pick(FOUR, ids=(2,))
    assert variables_for([device]) == {"CUDA_VISIBLE_DEVICES": UUID}


@pytest.mark.parametrize("spelling", [2, "2", " 2 ", UUID, UUID[:9]])
def test_numbers_uuids_and_beginnings_name_the_same_gpu(spelling: GpuId) -> None:
    assert find_device(FOUR, spelling, {}).uuid == UUID


def test_a_number_keeps_its_meaning_when_others_are_hidden() -> None:
    assert pick(FOUR, "3,2", ids=(2,))[0].uuid == UUID


# UUIDs and MIG names.


def test_slices_have_numbers() -> None:
    assert find_device(SPLIT, "0:1", {}).number == "0:1"


@pytest.mark.parametrize("spelling", [gpu(0).uuid, 0], ids=["uuid", "number"])
def test_the_gpu_of_slices_is_not_one_of_them(spelling: GpuId, snapshot: SnapshotAssertion) -> None:
    error = refusal(SPLIT, ids=(spelling,))
    assert isinstance(error, NoSuchDevice)
    assert error.fix.endswith("--gpu-ids 0:0")
    assert error == snapshot


def test_mig_uuids_and_their_beginnings_are_accepted() -> None:
    one = SPLIT.accelerators[2]
    assert one.uuid.startswith("MIG-")
    assert pick(SPLIT, ids=(one.uuid,)) == pick(SPLIT, ids=(one.uuid[:10],)) == (one,)


def test_a_gpu_in_mig_mode_without_slices_yet(snapshot: SnapshotAssertion) -> None:
    error = refusal(node(*split(gpu(0))), ids=(0,))
    assert error.fix == "sudo nvidia-smi mig -cgi … -C"
    assert error == snapshot


def test_a_split_gpu_whose_number_is_made_visible_still_has_its_slice() -> None:
    error = refusal(SPLIT, "0", ids=(0,))
    assert error.why.endswith(": 0:0")
    assert pick(SPLIT, "0", count=1)[0].number == "0:0"


@pytest.mark.parametrize("ids", [("0:0", "0:1"), ("0:0", "1")], ids=["slices", "slice and GPU"])
def test_several_slices_cannot_make_a_set(
    ids: tuple[str, ...], snapshot: SnapshotAssertion
) -> None:
    error = refusal(SPLIT, ids=ids)
    assert isinstance(error, NoSuchDevice)
    assert ", ".join(ids) in error.what
    assert error == snapshot


def test_one_of_several_slices_can_be_chosen() -> None:
    assert [one.number for one in pick(SPLIT, ids=("0:1", "0:0"), count=1)] == ["0:0"]


def test_an_ambiguous_beginning_lists_what_it_could_be(snapshot: SnapshotAssertion) -> None:
    error = refusal(FOUR, ids=("GPU-",))
    assert isinstance(error, NoSuchDevice)
    assert all(gpu(index).uuid in error.why for index in range(4))
    assert error == snapshot


@pytest.mark.parametrize("unknown", ["7", "GPU-feed", "0:0", "-1", "cuda"])
def test_an_unknown_id_lists_the_numbers_there_are(
    unknown: str, snapshot: SnapshotAssertion
) -> None:
    error = refusal(FOUR, ids=(unknown,))
    assert isinstance(error, NoSuchDevice)
    assert error.exit_code is ExitCode.IMPOSSIBLE
    assert f"GPU {unknown} " in error.what
    assert error.why.endswith(": 0, 1, 2, 3")
    assert error.fix.startswith("muster gpus --uuids")
    assert error == snapshot


def test_an_unknown_id_where_no_gpu_is_visible(snapshot: SnapshotAssertion) -> None:
    error = refusal(FOUR, "", ids=(9,))
    assert isinstance(error, NoSuchDevice)
    assert error == snapshot


def test_the_number_of_an_integrated_gpu_is_not_offered() -> None:
    beside = node(gpu(1), integrated())
    assert refusal(beside, ids=(0,)).why.endswith(": 1")


@pytest.mark.parametrize(("cuda", "shown"), [("0,1", "0,1"), ("", '""')], ids=["others", "none"])
@pytest.mark.parametrize("spelling", [2, UUID], ids=["number", "uuid"])
def test_a_hidden_gpu_is_refused_with_the_variable_that_hides_it(
    cuda: str, shown: str, spelling: GpuId, snapshot: SnapshotAssertion
) -> None:
    error = refusal(FOUR, cuda, ids=(spelling,))
    assert isinstance(error, NoSuchDevice)
    assert f"CUDA_VISIBLE_DEVICES={shown}" in error.why
    assert error == snapshot


def test_a_split_gpu_hidden_with_its_slices_is_hidden(snapshot: SnapshotAssertion) -> None:
    error = refusal(SPLIT, "1", ids=(0,))
    assert "CUDA_VISIBLE_DEVICES=1" in error.why
    assert error == snapshot


@pytest.mark.parametrize(
    "ids", [(2, 2), (2, UUID), ("2", UUID[:9])], ids=["number", "uuid", "prefix"]
)
def test_the_same_gpu_twice(ids: tuple[GpuId, ...], snapshot: SnapshotAssertion) -> None:
    error = refusal(FOUR, ids=ids)
    assert isinstance(error, NoSuchDevice)
    assert ", ".join(map(str, ids)) in error.what
    assert error == snapshot


def test_a_claimed_gpu_says_by_whom(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(MusterError) as caught:
        choose_devices(FOUR, DeviceRequest(ids=(2,)), environment={}, claims={UUID: claim()})
    assert "carol (pid 77, python train.py)" in caught.value.why
    assert caught.value.fix.splitlines()[0] == "muster gpus pick --gpu-ids 2 --wait"
    assert caught.value == snapshot
