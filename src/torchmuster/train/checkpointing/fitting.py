"""Whether a checkpoint is of this model and this optimiser; said before anything is read into them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchmuster.checkpoints.index import Index
from torchmuster.errors import Impossible
from torchmuster.train.checkpointing.host_bytes import DTYPES

_SHOWN = 5  # so many differences are named, then counted


def never_stepped(saved: Any, wanted: Any) -> tuple[str, ...]:
    """Return how the names begin that are not in a checkpoint since a parameter never had a gradient.

    ``saved`` and ``wanted`` are states without their tensors. An optimiser keeps nothing about such a parameter
    until its first step. Where it kept nothing at all, it may also have been of another kind.
    """
    was, now = saved.get("optimizer"), wanted.get("optimizer")
    if was is None or now is None:
        return ()
    if not was["state"] and _options(was) != _options(now):
        return ()
    names = [name for group in was["param_groups"] for name in group["params"]]
    return tuple(f"optimizer.state.{one}." for one in names if one not in was["state"])


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """Return what an optimiser was made with, but for its learning rate, which may have changed since."""
    changing = ("params", "lr", "initial_lr")
    return [
        {name: value for name, value in group.items() if name not in changing}
        for group in optimizer["param_groups"]
    ]


def refuse_another(
    name: str, index: Index, wanted: Mapping[str, torch.Tensor], *, saved: Mapping[str, str]
) -> None:
    """Raise if a tensor is missing, left over, or of another shape or type; ``saved`` is name -> stored name."""
    keeps_other = _other_optimizer(saved, wanted)
    differences = sorted(
        difference
        for one in wanted.keys() | saved.keys()
        if not (keeps_other and one.startswith("optimizer.state."))
        and (difference := _difference(one, index, wanted, saved))
    )
    if keeps_other:
        differences.insert(0, keeps_other)
    if not differences:
        return
    shown = differences[:_SHOWN]
    more = len(differences) - len(shown)
    raise Impossible(
        f"the checkpoint {name} is of another training: its tensors are not those of this one",
        why="\n".join([*shown, f"and {more} more"] if more else shown),
        fix="train with the model and the optimiser that it was saved with, or begin a new run",
    )


def _difference(
    name: str, index: Index, wanted: Mapping[str, torch.Tensor], saved: Mapping[str, str]
) -> str:
    if name not in wanted:
        return f"{name} is in the checkpoint and not in this training"
    if name not in saved:
        return f"{name} is not in the checkpoint"
    stored, tensor = index.tensors[saved[name]], wanted[name]
    if stored.shape != tuple(tensor.shape):
        return f"{name} is {list(stored.shape)} in the checkpoint, {list(tensor.shape)} here"
    dtype = DTYPES[stored.dtype]
    if dtype != tensor.dtype:
        return f"{name} is {_word(dtype)} in the checkpoint, {_word(tensor.dtype)} here"
    return ""


def _other_optimizer(saved: Iterable[str], wanted: Iterable[str]) -> str:
    """Say what the optimisers keep if that differs; each kind has its own words for it."""
    was, now = _kept(saved), _kept(wanted)
    if was == now:
        return ""
    return f"the optimiser was {_kind(was)}, this one is {_kind(now)}"


def _kept(names: Iterable[str]) -> frozenset[str]:
    return frozenset(one.rpartition(".")[2] for one in names if one.startswith("optimizer.state."))


def _kind(kept: frozenset[str]) -> str:
    if not kept:
        return "one that keeps nothing (SGD without momentum is one)"
    return f"one that keeps {', '.join(sorted(kept))} ({_KINDS.get(kept, 'of a kind of its own')})"


_KINDS = {
    frozenset({"exp_avg", "exp_avg_sq", "step"}): "as Adam and AdamW do",
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}): "as Adam with amsgrad does",
    frozenset({"momentum_buffer"}): "as SGD with momentum does",
    frozenset({"step", "sum"}): "as Adagrad does",
    frozenset({"square_avg", "step"}): "as RMSprop does",
}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
