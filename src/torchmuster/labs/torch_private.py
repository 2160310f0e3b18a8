"""The private names of torch that labs use."""

from torch import nn

from torchmuster.torch_internals import PrivateName, require

NAMES = (
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "record the operations of the learner's code",
    ),
    PrivateName(
        "torch.nn.Module._forward_hooks",
        "check whether the learner's code left hooks in a model",
    ),
)
require(NAMES)

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

__all__ = ["TorchDispatchMode", "forward_hooks"]


def forward_hooks(model: nn.Module) -> int:
    """Return how many forward hooks a model and its parts have."""
    return sum(len(module._forward_hooks) for module in model.modules())
