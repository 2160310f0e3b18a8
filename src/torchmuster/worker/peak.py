"""What this rank's device can compute at most, by its maker's figures; the share of it that is used is the MFU."""

import torch
from torch import nn

from torchmuster.plan.hardware import catalogue


def peak_flop_s(device: torch.device, model: nn.Module, compute: torch.dtype) -> float | None:
    """Return the device's highest rate in the type that a model is computed in; None where nobody has said it."""
    if device.type != "cuda":
        return None
    weights = {one.dtype for one in model.parameters()} - {torch.float32}
    if compute is torch.float32 and weights:
        return None  # the weights decide, and not all of them need be of one type
    known = catalogue.find(torch.cuda.get_device_name(device))
    if known is None:
        return None
    if compute is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return None  # TF32 has a rate of its own, which the catalogue does not have
    return known.card.flops.get(str(compute).removeprefix("torch."))
