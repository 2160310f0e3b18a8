"""The private names of torch that labs use."""

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# Private names, and what each is for:
# - torch.utils._python_dispatch.TorchDispatchMode: record the operations of the learner's code
# - torch.nn.Module._forward_hooks: check whether the learner's code left hooks in a model

__all__ = ["TorchDispatchMode", "forward_hooks"]


def forward_hooks(model: nn.Module) -> int:
    """Return how many forward hooks a model and its parts have."""
    return sum(len(module._forward_hooks) for module in model.modules())
