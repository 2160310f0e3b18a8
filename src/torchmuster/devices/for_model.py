"""How many devices a model of a given size needs for training, and how to split it over them.

A first estimate from sizes alone. It assumes weights, gradients and the two moments of AdamW, all
in the dtype of the weights (four times the weights), and leaves a tenth of each device for
activations and the driver. For a real model with its batch size and precision use ``muster plan``.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchmuster.decision import Decision
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.errors import DevicesBusy, Impossible, TooFewDevices
from torchmuster.units import format_bytes

TRAINING_STATES_PER_WEIGHT = 4
USABLE_SHARE = 0.9

Strategy = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Devices, and how the model is split over them."""

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
    """Choose the fewest devices that hold a model in training, or as many as requested.

    One device if it fits (single); with a count, a copy on each if it fits (ddp); else the model is
    sharded over as few devices as hold it (fsdp). Raises the refusal of the simplest layout.
    """
    if model_bytes <= 0:
        raise Impossible(
            "the model size must be above 0", fix="give the size of its weights, such as 14GB"
        )
    needed = model_bytes * TRAINING_STATES_PER_WEIGHT
    whole = math.ceil(needed / USABLE_SHARE)
    sizes = (
        f"{format_bytes(model_bytes)} of weights need {format_bytes(needed)} in training "
        "(weights, gradients, two AdamW moments, all in the weights' dtype; twice that with fp32 "
        "master weights)"
    )
    count = request.count or 1
    layouts: list[tuple[Strategy, int, int]] = [("single" if count < 2 else "ddp", count, whole)]
    for shards in range(2, len(node.accelerators) + 1):
        if request.count in (None, shards):
            layouts.append(("fsdp", shards, math.ceil(whole / shards)))
    refused: TooFewDevices | DevicesBusy | None = None
    for strategy, devices, each in layouts:
        shape = dataclasses.replace(
            request, count=devices, min_free_bytes=max(each, request.min_free_bytes or 0)
        )
        try:
            chosen = choose_devices(node, shape, environment=environment, claims=claims)
        except (TooFewDevices, DevicesBusy) as error:
            if not isinstance(refused, DevicesBusy):  # the simplest layout to wait for
                refused = error
            continue
        placement = Placement(devices=chosen.value, strategy=strategy)
        return Decision(value=placement, reason=f"{sizes}, strategy {strategy}; {chosen.reason}")
    assert refused is not None  # there is at least one layout
    refused.what = f"{sizes}: {refused.what}"
    raise refused
