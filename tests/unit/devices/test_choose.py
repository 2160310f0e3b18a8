"""Which devices are taken: what must hold on every machine, and the sentences on some."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from device_strategies import (
    Situation,
    busy,
    emptied,
    gpu,
    integrated,
    islands,
    link,
    node,
    situations,
)
from torchmuster.decision import Decision
from torchmuster.devices.choose import choose_devices, device_load, set_strength
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, LinkKind, Node
from torchmuster.devices.request import Claim, DeviceRequest, in_use_by, obstacle
from torchmuster.devices.visibility import visible
from torchmuster.errors import (
    DevicesBusy,
    ExitCode,
    MusterError,
    NoSuchDevice,
    TooFewDevices,
)
from torchmuster.units import GiB

Choice = Decision[tuple[Device, ...]]
on_every_machine = settings(max_examples=150, deadline=None)


def outcome(case: Situation, **changes: Any) -> Choice | MusterError:
    case = replace(case, **changes)
    try:
        return choose_devices(
            case.node, case.request, environment=case.environment, claims=case.claims
        )
    except MusterError as error:
        return error


def is_refusal(result: Choice | MusterError) -> bool:
    return isinstance(result, TooFewDevices | DevicesBusy)


def may_be_taken(device: Device, request: DeviceRequest, claims: Mapping[str, Claim]) -> bool:
    """The conditions, each in its plainest form."""
    return (
        device.trouble is None
        and not device.compute_prohibited
        and device.uuid not in claims
        and (device.total_bytes or 0) >= (request.min_total_bytes or 0)
        and (device.free_bytes or 0) >= (request.min_free_bytes or 0)
        and (request.share or not in_use_by(device))
    )


@on_every_machine
@given(situations())
def test_a_choice_never_breaks_a_condition(case: Situation) -> None:
    result = outcome(case)
    if not isinstance(result, Decision):
        return
    chosen = result.value
    assert chosen
    assert len({one.uuid for one in chosen}) == len(chosen)
    seen = visible(case.node.accelerators, case.environment).devices
    assert all(one in seen for one in chosen)
    assert all(may_be_taken(one, case.request, case.claims) for one in chosen)
    assert len({one.kind for one in chosen}) == 1
    assert len(chosen) == 1 or all(not one.mig_enabled for one in chosen)
    if case.request.count is not None:
        assert len(chosen) == case.request.count
    if case.request.ids is None:
        assert chosen[0].kind is case.node.main_kind
    else:
        named = device_candidates(case.node, case.request, case.environment)
        assert set(chosen) <= set(named)
        assert case.request.count is not None or set(chosen) == set(named)


def eligible(case: Situation) -> list[Device]:
    offered = device_candidates(case.node, case.request, case.environment)
    return [one for one in offered if may_be_taken(one, case.request, case.claims)]


@on_every_machine
@given(st.one_of(situations(), situations(quiet=True)))
def test_no_less_loaded_device_is_passed_over(case: Situation) -> None:
    result = outcome(case)
    if isinstance(result, Decision):
        outside = set(eligible(case)) - set(result.value)
        heaviest = max(device_load(one) for one in result.value)
        assert all(device_load(one) >= heaviest for one in outside)


def merit(machine: Node, members: Sequence[Device]) -> tuple[Any, ...]:
    """How good a set of equally loaded devices is, best lowest."""
    weakest, total = set_strength(machine, members)
    ages = sorted(one.compute_capability or (0, 0) for one in members)
    return (
        len({(one.name, one.total_bytes) for one in members}),
        -weakest,
        -total,
        -min((one.free_bytes or 0) // GiB for one in members),
        [(-major, -minor) for major, minor in ages],
        sorted(one.place for one in members),
    )


@on_every_machine
@given(st.one_of(situations(), situations(quiet=True)))
def test_of_equally_loaded_sets_the_best_one_is_taken(case: Situation) -> None:
    result = outcome(case)
    if not isinstance(result, Decision):
        return
    loads = sorted(device_load(one) for one in result.value)
    rivals = [
        members
        for members in itertools.combinations(eligible(case), len(result.value))
        if sorted(device_load(one) for one in members) == loads
    ]
    assert merit(case.node, result.value) == min(merit(case.node, one) for one in rivals)


@on_every_machine
@given(situations())
def test_a_refusal_names_what_stands_in_the_way_of_each_device(case: Situation) -> None:
    result = outcome(case)
    if isinstance(result, Decision) or not is_refusal(result):
        return
    offered = device_candidates(case.node, case.request, case.environment)
    for device in offered:
        found = obstacle(device, case.request, case.claims)
        assert (found is None) == may_be_taken(device, case.request, case.claims)
        if found is not None:
            assert found.text in result.why or found.brief in result.why
            assert device.number in numbers(result.why)
    before, asked, after = result.what.partition(str(case.request))
    assert asked
    assert str(len(eligible(case)) or "none") in (before + after).split()


@on_every_machine
@given(situations())
def test_waiting_is_advised_exactly_when_it_can_help(case: Situation) -> None:
    result = outcome(case)
    if isinstance(result, Decision) or not is_refusal(result):
        return
    after = outcome(case, node=emptied(case.node), claims={})
    assert isinstance(result, DevicesBusy) == isinstance(after, Decision)
    assert ("--wait" in result.fix) == isinstance(result, DevicesBusy)


@on_every_machine
@given(situations(), st.randoms(use_true_random=False))
def test_the_order_in_which_devices_were_read_does_not_matter(case: Situation, random: Any) -> None:
    shuffled = list(case.node.accelerators)
    random.shuffle(shuffled)
    result = outcome(case)
    again = outcome(case, node=replace(case.node, accelerators=tuple(shuffled)))
    if isinstance(result, Decision):
        assert again == result
    else:
        assert type(again) is type(result)
        assert not is_refusal(result) or str(again) == str(result)


def numbers(text: str) -> set[str]:
    """The device numbers that a sentence names, ranges written out."""
    found: set[str] = set()
    for first, last in re.findall(r"(?<![\w.-])(\d+(?::\d+)?)(?:-(\d+))?(?![\w.])", text):
        found |= {str(one) for one in range(int(first), int(last) + 1)} if last else {first}
    return found


@on_every_machine
@given(situations())
def test_the_reason_names_every_device_and_what_was_passed_over(case: Situation) -> None:
    result = outcome(case)
    if not isinstance(result, Decision):
        return
    _, asked, rest = result.reason.partition(str(case.request))
    assert asked
    assert {one.number for one in result.value} <= numbers(rest)
    blocked = set(device_candidates(case.node, case.request, case.environment)) - set(
        eligible(case)
    )
    assert {one.number for one in blocked} <= numbers(rest.partition("; ")[2])


# The scenarios of the GPU selection guide, as choices.

EIGHT = [gpu(index) for index in range(8)]
DGX = node(*EIGHT, links=islands(EIGHT, 8, lanes=12))


def pick(
    machine: Node,
    *,
    claims: Mapping[str, Claim] | None = None,
    cuda: str | None = None,
    **asked: Any,
) -> Choice:
    environment = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    return choose_devices(machine, DeviceRequest(**asked), environment=environment, claims=claims)


def indices(choice: Choice) -> list[int]:
    return [one.index for one in choice.value]


def refusal_of(machine: Node, **asked: Any) -> MusterError:
    with pytest.raises(MusterError) as caught:
        pick(machine, **asked)
    return caught.value


@pytest.mark.parametrize("count", range(2, 9))
def test_ddp_takes_so_many_gpus_joined_by_nvlink(count: int, snapshot: SnapshotAssertion) -> None:
    choice = pick(DGX, count=count)
    assert indices(choice) == list(range(count))
    assert ("GPUs 0, 1" if count == 2 else f"GPUs 0-{count - 1}") in choice.reason
    assert "(NV12)" in choice.reason
    assert choice.reason == snapshot


def test_fsdp_on_the_whole_machine(snapshot: SnapshotAssertion) -> None:
    choice = pick(DGX, ids=tuple(range(8)), min_free_bytes=70 * GiB)
    assert indices(choice) == list(range(8))
    assert choice.reason == snapshot


def test_two_nodes_choose_each_for_itself(snapshot: SnapshotAssertion) -> None:
    second = node(busy(EIGHT[0], "alice"), *EIGHT[1:])
    assert indices(pick(DGX, count=8)) == list(range(8))
    error = refusal_of(second, count=8)
    assert isinstance(error, DevicesBusy)
    assert error.fix.splitlines() == ["wait for them: --wait", "request 7 GPUs: --num-gpus 7"]
    assert error == snapshot


def test_a_subset_of_a_shared_server(snapshot: SnapshotAssertion) -> None:
    choice = pick(DGX, cuda="2,3,5,7")
    assert indices(choice) == [2, 3, 5, 7]
    assert "GPUs 2, 3, 5, 7" in choice.reason
    error = refusal_of(DGX, count=5, cuda="2,3,5,7")
    assert isinstance(error, TooFewDevices)
    assert "CUDA_VISIBLE_DEVICES=2,3,5,7" in error.why
    assert error.fix == "request 4 GPUs: --num-gpus 4"
    assert error == snapshot


@pytest.mark.parametrize("asked", [{}, {"count": 1}], ids=["all", "one"])
def test_an_empty_variable_means_the_cpu(
    asked: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    error = refusal_of(DGX, cuda="", **asked)
    assert isinstance(error, TooFewDevices)
    assert 'CUDA_VISIBLE_DEVICES=""' in error.why
    assert error == snapshot


def test_a_machine_without_gpus_says_so(snapshot: SnapshotAssertion) -> None:
    error = refusal_of(node(), count=2)
    assert isinstance(error, TooFewDevices)
    assert error == snapshot


def test_a_pair_joined_by_nvlink_is_preferred() -> None:
    four = [gpu(index) for index in range(4)]
    pairs = [
        link(four[1], four[3], LinkKind.NVLINK, 4),
        *(link(four[0], other, LinkKind.PIX) for other in four[1:]),
        link(four[1], four[2], LinkKind.SYS),
        link(four[2], four[3], LinkKind.SYS),
    ]
    choice = pick(node(*four, links=pairs), count=2)
    assert indices(choice) == [1, 3]
    assert "(NV4)" in choice.reason


def test_the_weakest_link_counts_before_the_sum(snapshot: SnapshotAssertion) -> None:
    four = [gpu(index) for index in range(4)]
    fast_but_apart = {(0, 1): LinkKind.NVLINK, (0, 2): LinkKind.NVLINK, (1, 2): LinkKind.SYS}
    links = [
        link(a, b, fast_but_apart.get((a.index, b.index), LinkKind.PHB), 12)
        for a, b in itertools.combinations(four, 2)
    ]
    choice = pick(node(*four, links=links), count=3)
    assert indices(choice) == [0, 1, 3]
    assert "(PHB)" in choice.reason
    assert choice.reason == snapshot


def test_a_large_machine_gives_the_island_that_is_free() -> None:
    work = [gpu(index, utilization_percent=50) if index < 40 else gpu(index) for index in range(64)]
    choice = pick(node(*work, links=islands(work, 8)), count=8)
    assert indices(choice) == list(range(40, 48))


def test_beside_nvidia_an_integrated_gpu_is_neither_counted_nor_numbered() -> None:
    machine = node(integrated(), gpu(0), gpu(1))
    assert [one.uuid for one in pick(machine).value] == [gpu(0).uuid, gpu(1).uuid]
    assert [one.uuid for one in pick(machine, ids=(0,)).value] == [gpu(0).uuid]
    error = refusal_of(machine, count=3)
    assert isinstance(error, TooFewDevices)
    assert error.fix == "request 2 GPUs: --num-gpus 2"
    error = refusal_of(machine, ids=(2,))
    assert isinstance(error, NoSuchDevice)
    assert error.why.endswith(": 0, 1")


def test_an_integrated_gpu_is_taken_when_it_is_named_or_alone() -> None:
    inside = integrated()
    assert pick(node(gpu(0), inside), ids=(inside.uuid,)).value == (inside,)
    assert pick(node(inside), count=1).value == (inside,)


@pytest.mark.parametrize(
    ("device", "asked", "fact"),
    [
        (gpu(0, trouble="GPU is lost"), {}, "GPU is lost"),
        (gpu(0, compute_prohibited=True), {}, "prohibited"),
        (gpu(0), {"min_total_bytes": 90 * GiB}, "80.0 GiB"),
        (gpu(0), {"min_free_bytes": 90 * GiB}, "80.0 GiB"),
        (gpu(0, reserved_bytes=GiB), {"min_free_bytes": 80 * GiB}, "79.0 GiB"),
        (gpu(0, total_bytes=None), {"min_total_bytes": 1}, "GPU 0"),
        (gpu(0, total_bytes=None), {"min_free_bytes": 1}, "GPU 0"),
        (gpu(0, used_bytes=None), {"min_free_bytes": 1}, "GPU 0"),
    ],
    ids=[
        "lost",
        "prohibited",
        "total",
        "free",
        "reserved",
        "unknown total",
        "unknown total and free",
        "unknown use",
    ],
)
def test_what_will_not_pass_is_not_waited_for(
    device: Device, asked: dict[str, Any], fact: str, snapshot: SnapshotAssertion
) -> None:
    error = refusal_of(node(device), count=1, **asked)
    assert isinstance(error, TooFewDevices)
    assert error.exit_code is ExitCode.IMPOSSIBLE
    assert fact in error.why
    assert error.why == snapshot
