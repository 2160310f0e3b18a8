"""Find trained parameters that get no gradient: DDP ranks would wait for them forever."""

from torch import nn

from torchmuster.errors import MusterError
from torchmuster.units import plural

_NAMES_SHOWN = 10


def refuse_unused_parameters(model: nn.Module) -> None:
    """Raise with the names of parameters that have no gradient on this rank."""
    names = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            names.append(name)
    if not names:
        return
    shown = ", ".join(names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        shown += f" and {len(names) - _NAMES_SHOWN} more"
    raise MusterError(
        f"{plural(len(names), 'trained parameter')} got no gradient in the first step: {shown}",
        why="ddp averages the gradient of every trainable parameter, and ranks would wait forever "
        "for one that never arrives",
        fix="remove them from the model or freeze them with requires_grad_(False), which costs "
        "nothing; use them on every rank in every step, multiplied by 0 where they are not needed; or "
        "set find_unused_parameters=True: ddp then searches for them after every forward pass, "
        "which traverses the whole graph in each step",
    )
