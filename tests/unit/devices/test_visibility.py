"""Which devices the environment leaves visible, and what is said about values that mislead."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from device_strategies import RTX_4090, gpu, integrated, split
from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.visibility import STAGES, Visible, variables_for, visible
from torchmuster.finding import Status

FOUR = [gpu(index) for index in range(4)]
UUIDS = [one.uuid for one in FOUR]
SPLIT = [*split(gpu(0), 1, 1), gpu(1), gpu(2)]
SLICES = [one.uuid for one in SPLIT if one.mig_index is not None]
MIXED = [gpu(0), gpu(1, name=RTX_4090), gpu(2)]
ROCM = [gpu(n, kind=DeviceKind.ROCM, uuid=f"GPU-{n:x}0000000000000a{n:x}") for n in range(4)]
XPU = [integrated(index) for index in range(3)]


def shown(devices: Sequence[Device], **environment: str) -> Visible:
    return visible(devices, environment)


def cuda(devices: Sequence[Device], text: str) -> Visible:
    return shown(devices, CUDA_VISIBLE_DEVICES=text)


def numbers(seen: Visible) -> list[str]:
    return [one.number for one in seen.devices]


def blamed_by(seen: Visible) -> str | None:
    """The part of the variable that the only finding quotes, or None without a finding."""
    if not seen.findings:
        return None
    (finding,) = seen.findings
    return finding.why.split("'")[1]


def test_without_a_variable_everything_is_visible() -> None:
    seen = shown(FOUR)
    assert (seen.devices, seen.hidden_by, seen.findings) == (tuple(FOUR), {}, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        ("0,1,2,3", [0, 1, 2, 3]),
        (" 1 , 3 ", [1, 3]),
        ("+1,03", [1, 3]),
        ("1gpu,2", [1, 2]),
        (UUIDS[3], [3]),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        (f"{UUIDS[1][:8]},{UUIDS[3][:8]}", [1, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_values_that_mean_what_they_say(text: str, expected: list[int]) -> None:
    seen = cuda(FOUR, text)
    assert [one.index for one in seen.devices] == expected
    assert seen.findings == ()
    assert seen.hidden_by.keys() == {one.uuid for one in FOUR if one.index not in expected}


@pytest.mark.parametrize(
    ("text", "expected", "blamed"),
    [
        ("9", [], "9"),
        ("1,9,2", [1], "9"),
        ("0,-1,1", [0], "-1"),
        ("0,,1", [0], ""),
        ("0, x,1", [0], " x"),
        ("all", [], "all"),
        ("0,0", [], "0"),
        ("0,9,0", [], "0"),
        ("0,9,9", [], "9"),
        ("1,01", [], "01"),
        ("0,-1,0", [0], "-1"),
        (f"{UUIDS[0]},{UUIDS[0]}", [], UUIDS[0]),
        (f"{UUIDS[0]},{UUIDS[0][:9]}", [], UUIDS[0][:9]),
        (f"{UUIDS[0]},GPU-", [0], "GPU-"),
        (f"{UUIDS[0]}, {UUIDS[1]}", [0], f" {UUIDS[1]}"),
        ("GPU-none,GPU-none", [], "GPU-none"),
        (f"{UUIDS[1]},2", [1], "2"),
        (f"2,{UUIDS[1]}", [2], UUIDS[1]),
    ],
)
def test_values_that_mislead_are_told(text: str, expected: list[int], blamed: str) -> None:
    seen = cuda(FOUR, text)
    assert [one.index for one in seen.devices] == expected
    (finding,) = seen.findings
    assert finding.name == "visible-devices-partly-ignored"
    assert finding.status is Status.WARNING
    assert f"CUDA_VISIBLE_DEVICES={text} " in finding.what
    assert all(f"GPU {index}" in finding.what for index in expected)
    assert blamed_by(seen) == blamed
    assert finding.fix.startswith("muster gpus --json")


# MIG


def test_a_split_gpu_is_seen_through_its_slices_only() -> None:
    assert numbers(shown(SPLIT)) == ["0:0", "0:1", "1", "2"]


def test_one_slice_can_be_named() -> None:
    seen = cuda(SPLIT, SLICES[1])
    assert (numbers(seen), seen.findings) == (["0:1"], ())
    assert numbers(cuda(SPLIT, SLICES[1][:9])) == ["0:1"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (",".join(SLICES), "0:0"),
        (f"{SLICES[1]},{SLICES[0]}", "0:1"),
        ("0", "0:0"),
        ("1,0", "0:0"),
        (SPLIT[0].uuid, "0:0"),
    ],
)
def test_beside_a_slice_nothing_else_is_visible(text: str, left: str) -> None:
    seen = cuda(SPLIT, text)
    assert numbers(seen) == [left]
    (finding,) = seen.findings
    assert f"CUDA_VISIBLE_DEVICES={text} " in finding.what
    assert f"GPU {left}" in finding.what
    assert "MIG" in finding.why


# The order of unlike cards


def test_numbers_of_unlike_cards_are_ambiguous(snapshot: SnapshotAssertion) -> None:
    (finding,) = cuda(MIXED, "1,0").findings
    assert finding.name == "visible-devices-order"
    assert finding.status is Status.WARNING
    assert finding.fix == f"export CUDA_VISIBLE_DEVICES={MIXED[1].uuid},{MIXED[0].uuid}"
    assert finding == snapshot


# ROCm


def test_the_second_stage_of_rocm_counts_within_the_first() -> None:
    seen = shown(ROCM, ROCR_VISIBLE_DEVICES="3,1", HIP_VISIBLE_DEVICES="1")
    assert numbers(seen) == ["1"]
    assert seen.hidden_by[ROCM[0].uuid] == "ROCR_VISIBLE_DEVICES=3,1"
    assert seen.hidden_by[ROCM[3].uuid] == "HIP_VISIBLE_DEVICES=1"


def test_rocm_listens_to_cudas_variable_when_hips_is_not_set() -> None:
    assert numbers(shown(ROCM, CUDA_VISIBLE_DEVICES="2")) == ["2"]
    assert numbers(shown(ROCM, HIP_VISIBLE_DEVICES="3", CUDA_VISIBLE_DEVICES="2")) == ["3"]


@pytest.mark.parametrize(
    ("text", "expected", "blamed"),
    [
        ("0,GPU-2", ["0", "2"], None),
        ("gpu-30000000000000A3, 1", ["3", "1"], None),
        ("-1", [], None),
        ("", [], None),
        ("1,1,2", ["1"], "1"),
        ("1,GPU-1,2", ["1"], "GPU-1"),
        ("1gpu", [], "1gpu"),
        ("0,", ["0"], ""),
        ("0,7", ["0"], "7"),
        ("0,GPU-", ["0"], "GPU-"),
    ],
)
def test_rocm_reads_numbers_and_uuids_in_one_list(
    text: str, expected: list[str], blamed: str | None
) -> None:
    seen = shown(ROCM, ROCR_VISIBLE_DEVICES=text)
    assert numbers(seen) == expected
    assert blamed_by(seen) == blamed


# Intel


@pytest.mark.parametrize(
    ("text", "expected", "blamed"),
    [
        ("1", ["1"], None),
        ("2,0", ["0", "2"], None),
        ("0.1, 1.0,1.1", ["0", "1"], None),
        ("", ["0", "1", "2"], None),
        ("0,7,1", ["0", "1"], None),
    ],
)
def test_intels_mask_is_a_set_of_gpus_and_their_tiles(
    text: str, expected: list[str], blamed: str | None
) -> None:
    seen = shown(XPU, ZE_AFFINITY_MASK=text)
    assert numbers(seen) == expected
    assert blamed_by(seen) == blamed


def test_each_kind_listens_to_its_own_variable() -> None:
    both = [*FOUR[:2], *XPU[:2]]
    seen = shown(both, CUDA_VISIBLE_DEVICES="1", ZE_AFFINITY_MASK="0")
    assert [one.uuid for one in seen.devices] == [UUIDS[1], XPU[0].uuid]


# What is exported is what is seen.


def seen_after_export(devices: Sequence[Device], chosen: Sequence[Device]) -> tuple[Device, ...]:
    before = dict.fromkeys((name for s in STAGES.values() for t in s for name in t), "0")
    after = {**before, **variables_for(chosen)}
    environment = {name: value for name, value in after.items() if value is not None}
    seen = visible(devices, environment)
    assert seen.findings == ()
    return seen.devices


NAMELESS = [replace(one, uuid=f"ROCM-0000:0{one.index}:00.0") for one in ROCM]
FAMILIES = {"cuda": FOUR, "mixed": MIXED, "rocm": ROCM, "rocm-by-number": NAMELESS, "xpu": XPU}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_subset_can_be_exported(family: str) -> None:
    devices = FAMILIES[family]
    for count in range(1, len(devices) + 1):
        for chosen in itertools.combinations(devices, count):
            assert seen_after_export(devices, chosen) == chosen


@pytest.mark.parametrize("chosen", [[SPLIT[1]], [SPLIT[2]], SPLIT[3:]])
def test_a_slice_or_the_whole_gpus_beside_it_can_be_exported(chosen: list[Device]) -> None:
    assert list(seen_after_export(SPLIT, chosen)) == chosen


@given(st.permutations(FOUR), st.integers(1, 4))
def test_cuda_keeps_the_order_that_is_exported(order: list[Device], count: int) -> None:
    assert list(seen_after_export(FOUR, order[:count])) == order[:count]


def test_rocms_second_stage_is_unset() -> None:
    assert variables_for(ROCM[2:3]) == {
        "ROCR_VISIBLE_DEVICES": ROCM[2].uuid,
        "HIP_VISIBLE_DEVICES": None,
        "CUDA_VISIBLE_DEVICES": None,
    }
