"""Batch normalisation keeps a batch's statistics for its backward in a type that torch's rule for shapes gets wrong."""

from typing import Any

from torchmuster.plan.torch_private import BATCH_NORM


def with_kept_statistics(
    operation: Any, args: tuple[Any, ...], result: Any, *, on_host: bool
) -> Any:
    """Return the result of an operation with statistics as a real one has them; what has them so stays as it is.

    CUDA keeps them in 32 bits. A CPU does if weights, or else running means, are of another type than the
    input. The rule for tensors without memory says the input's type always, and what is computed with that in
    the backward fails.
    """
    if operation not in BATCH_NORM:
        return result
    given, *parameters = args[:5]  # input, weight, bias, running mean and variance
    first = next((one for one in parameters if one is not None), given)
    if on_host and first.dtype is given.dtype:
        return result
    output, mean, deviation = result
    return output, mean.float(), deviation.float()
