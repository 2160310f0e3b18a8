"""How many devices a model of a given size needs for training, and how to split it over them.

A first estimate from sizes alone. It assumes weights, gradients and the two moments of AdamW, all
in the dtype of the weights (four times the weights), and leaves a tenth of each device for
activations and the driver. For a real model with its batch size and precision use ``muster plan``.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torchmuster.decision import Decision
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.errors import DevicesBusy, Impossible, MusterError, TooFewDevices
from torchmuster.units import format_bytes, plural

TRAINING_STATES_PER_WEIGHT = 4
USABLE_SHARE = 0.9

Strategy = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layout of a model: the devices to request, and how the model is split."""

    request: DeviceRequest
    strategy: Strategy


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Devices, and the layout of the model on them."""

    devices: tuple[Device, ...]
    strategy: Strategy


def choose_for_model(
    node: Node,
    model_bytes: int,
    request: DeviceRequest,
    *,
    environment: Mapping[str, str],
    claims: Mapping[str, Claim] | None = None,
) -> Decision[Placement]:
    """Choose the fewest devices that hold a model in training, or as many as requested."""
    shape = shape_for_model(node, model_bytes, request, environment=environment, claims=claims)
    chosen = choose_devices(node, shape.value.request, environment=environment, claims=claims)
    placement = Placement(devices=chosen.value, strategy=shape.value.strategy)
    return Decision(value=placement, reason=f"{shape.reason}; {chosen.reason}")


def shape_for_model(
    node: Node,
    model_bytes: int,
    request: DeviceRequest,
    *,
    environment: Mapping[str, str],
    claims: Mapping[str, Claim] | None = None,
) -> Decision[Shape]:
    """Turn a model's size into a request: one that can be met now, else one worth waiting for.

    One device if it fits (single); with a count, a copy on each if it fits (ddp); else the model is
    sharded over as few devices as hold it (fsdp).
    """
    if model_bytes <= 0:
        raise Impossible(
            "the model size must be above 0", fix="give the size of its weights, such as 14GB"
        )
    needed = model_bytes * TRAINING_STATES_PER_WEIGHT
    whole = math.ceil(needed / USABLE_SHARE)
    story = (
        f"{format_bytes(model_bytes)} of weights need {format_bytes(needed)} in training "
        "(weights, gradients, two AdamW moments, all in the weights' dtype; twice that with fp32 "
        "master weights)"
    )
    for state, holders in ((node, claims), (_emptied(node), None)):
        for shape, how in _shapes(node, whole, request):
            try:
                choose_devices(state, shape.request, environment=environment, claims=holders)
            except (TooFewDevices, DevicesBusy):
                continue
            return Decision(value=shape, reason=f"{story}: {how}")
    raise _too_large(node, request, environment, whole, story)


def _shapes(node: Node, whole: int, request: DeviceRequest) -> Iterator[tuple[Shape, str]]:
    """Yield the layouts that hold ``whole`` bytes, the simplest first, each with its reason."""

    def shape(count: int, each: int, strategy: Strategy) -> Shape:
        each = max(each, request.min_free_bytes or 0)
        asked = dataclasses.replace(request, count=count, min_free_bytes=each)
        return Shape(request=asked, strategy=strategy)

    if request.count is None or request.count == 1:
        yield shape(1, whole, "single"), "they fit on one GPU (strategy: single)"
    else:
        yield shape(request.count, whole, "ddp"), "a copy fits on each GPU (strategy: ddp)"
    counts = range(2, len(node.accelerators) + 1) if request.count is None else [request.count]
    for count in counts:
        if count > 1:
            each = math.ceil(whole / count)
            words = f"too much for one GPU, but {format_bytes(each)} on each of {count} (strategy: fsdp)"
            yield shape(count, each, "fsdp"), words


def _emptied(node: Node) -> Node:
    """Return the same host without processes on its devices."""
    return dataclasses.replace(
        node,
        accelerators=tuple(
            dataclasses.replace(one, used_bytes=0, utilization_percent=0, processes=())
            for one in node.accelerators
        ),
    )


def _too_large(
    node: Node, request: DeviceRequest, environment: Mapping[str, str], whole: int, story: str
) -> MusterError:
    """Return the error that says how much is missing, in GPUs of the size that is here."""
    what = f"{story}, and that does not fit here"
    together = device_candidates(node, request, environment)
    # Where every GPU is split, one MIG slice was all that could be tried.
    alone = device_candidates(node, dataclasses.replace(request, count=1), environment)
    usable = [one for one in together or alone if not one.trouble]
    sizes = sorted((one.total_bytes for one in usable if one.total_bytes), reverse=True)
    if not sizes:
        unknown = "no GPU here reports its memory size"
        why = unknown if usable else "no GPU can be used here"
        return TooFewDevices(
            what, why=why, fix="run on the CPU: start the program without picking GPUs"
        )
    allowed = sizes[: request.count if together else 1]
    have = f"{plural(len(allowed), 'usable GPU')} have {format_bytes(sum(allowed))} together"
    if len(allowed) == 1:
        have = f"one usable GPU has {format_bytes(sizes[0])}"
    return TooFewDevices(
        what,
        why=f"with a 10 % reserve, {format_bytes(whole)} are needed in equal parts, but the {have}",
        fix=f"use {plural(math.ceil(whole / sizes[0]), 'GPU')} of {format_bytes(sizes[0])}, "
        "a smaller dtype, LoRA, or fsdp_cpu_offload: true",
    )
