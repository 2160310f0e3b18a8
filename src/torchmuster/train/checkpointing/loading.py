"""Load a checkpoint into the tensors of a training state that is already distributed."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torchmuster.checkpoints.base_model import refuse_other_base
from torchmuster.checkpoints.store import Store, read_small
from torchmuster.checkpoints.tensor_file import INDEX, Index
from torchmuster.checkpoints.tensor_file import MOST_BYTES as MOST_INDEX_BYTES
from torchmuster.checkpoints.verify import (
    NewestCheckpoint,
    look_at_checkpoint,
    newest_first,
    verify_file,
)
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.checkpointing.flatten import flatten, shared_tensors, unflatten
from torchmuster.train.checkpointing.storage import DTYPES, STATE, Reader, file_of_rank
from torchmuster.train.world import World, all_gather_object

T = TypeVar("T")


def newest_valid_checkpoint(
    store: Store, world: World, group: dist.ProcessGroup
) -> NewestCheckpoint | None:
    """Return the newest checkpoint whose files are all intact; None if there is no checkpoint.

    Each rank reads its share of the files. If there are checkpoints and none of them is good, it
    raises an error: starting from scratch would silently discard all of them.
    """
    names = run_on_all_ranks(lambda: newest_first(store) if world.is_first else [], world, group)[0]
    rejected: list[Finding] = []
    for name in names:
        findings = _loading_findings(store, name, world, group)
        if not findings:
            manifest = look_at_checkpoint(store, name)[0]
            assert manifest is not None  # it has just been read
            return NewestCheckpoint(name=name, manifest=manifest, rejected=tuple(rejected))
        rejected += findings
    if any(one.status is Status.FAILURE for one in rejected):
        raise MusterError(
            f"all checkpoints in {store.where} are unusable",
            why="\n".join(one.what for one in rejected),
            fix="to see the errors: muster checkpoint verify; to start from scratch, move the "
            "checkpoints away",
        )
    return None


def run_on_all_ranks(work: Callable[[], T], world: World, group: dist.ProcessGroup) -> list[T]:
    """Call a function on each rank, return all results (JSON types); an error raises on all."""
    value: Any = None
    problem = ""
    try:
        value = work()
    except (MusterError, OSError, ValueError) as error:
        problem = "; ".join(str(error).splitlines()) or type(error).__name__
    told = all_gather_object([value, problem], world, group)
    for rank, (_, theirs) in enumerate(told):
        if theirs:
            raise MusterError(f"rank {rank}: {theirs}" if world.world_size > 1 else theirs)
    return [one for one, _ in told]


def finding_of_rank(told: dict[str, str]) -> Finding:
    """Rebuild a finding of another rank."""
    return Finding(
        name=told["name"],
        status=Status(told["status"]),
        what=told["what"],
        why=told["why"],
        fix=told["fix"],
        evidence=told["evidence"],
    )


def _loading_findings(
    store: Store, name: str, world: World, group: dist.ProcessGroup
) -> list[Finding]:
    """Return the findings of all ranks, without duplicates."""
    told = run_on_all_ranks(lambda: _found_here(store, name, world), world, group)
    findings: dict[str, Finding] = {}
    for rank, theirs in enumerate(told):
        for one in theirs:
            evidence = f"{one['evidence']} (seen by rank {rank})"
            findings.setdefault(
                one["what"],
                finding_of_rank({**one, "evidence": evidence}),
            )
    return list(findings.values())


def _found_here(store: Store, name: str, world: World) -> list[dict[str, str]]:
    manifest, findings = look_at_checkpoint(store, name)
    if manifest is not None and not findings:
        files = sorted(manifest.files)
        for file in files[world.global_rank :: world.world_size]:
            findings += verify_file(store, name, file, manifest.files[file])
    return [one.as_json() for one in findings]


_SHOWN = 5  # differences named in an error; the rest is counted


def never_stepped(saved: Any, wanted: Any) -> tuple[str, ...]:
    """Return the name prefixes missing in a checkpoint because a parameter never had a gradient.

    ``saved`` and ``wanted`` are states without their tensors. An optimizer has no state for such a
    parameter until its first step. If it has no state at all, it may also be a different kind of
    optimizer.
    """
    was, now = saved.get("optimizer"), wanted.get("optimizer")
    if was is None or now is None:
        return ()
    if not was["state"] and _options(was) != _options(now):
        return ()
    names = [name for group in was["param_groups"] for name in group["params"]]
    return tuple(f"optimizer.state.{one}." for one in names if one not in was["state"])


def _options(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's options except those that differ between groups and over time."""
    changing = ("params", "lr", "initial_lr", "weight_decay", "use_muon")
    return {
        name: value
        for group in optimizer["param_groups"]
        for name, value in group.items()
        if name not in changing
    }


def refuse_incompatible_state(
    name: str, index: Index, wanted: Mapping[str, torch.Tensor], *, saved: Mapping[str, str]
) -> None:
    """Raise if a tensor is missing, extra, or of another shape or dtype.

    ``saved`` maps each name to its stored name.
    """
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
        f"the checkpoint {name} does not match this run: its tensors differ",
        why="\n".join([*shown, f"and {more} more"] if more else shown),
        fix="use the model and the optimizer that it was saved with, or start a new run",
    )


def _difference(
    name: str, index: Index, wanted: Mapping[str, torch.Tensor], saved: Mapping[str, str]
) -> str:
    if name not in wanted:
        return f"{name} is in the checkpoint but not in this run"
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
    """Describe the difference of optimizer states, if any; each kind has its own state names."""
    was, now = _kept(saved), _kept(wanted)
    if was == now:
        return ""
    return f"the saved optimizer {_loading_kind(was)}, this one {_loading_kind(now)}"


def _kept(names: Iterable[str]) -> frozenset[str]:
    return frozenset(one.rpartition(".")[2] for one in names if one.startswith("optimizer.state."))


def _loading_kind(kept: frozenset[str]) -> str:
    if not kept:
        return "has no state (such as SGD without momentum)"
    return f"has {', '.join(sorted(kept))} ({_KINDS.get(kept, 'unknown kind')})"


_KINDS = {
    frozenset({"exp_avg", "exp_avg_sq", "step"}): "like Adam and AdamW",
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}): "like Adam with amsgrad",
    frozenset({"momentum_buffer"}): "like SGD with momentum",
    frozenset({"step", "sum"}): "like Adagrad",
    frozenset({"square_avg", "step"}): "like RMSprop",
    frozenset({"col_var", "row_var", "step", "variance"}): "like Adafactor",
    frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "step"}): "like Muon with AdamW",
    frozenset({"absmax1", "absmax2", "qmap1", "qmap2", "state1", "state2"}): "like 8-bit AdamW",
}


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_MOST_STATE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """A state, and this rank's own part; None if it was saved by another number of ranks."""

    state: dict[str, Any]
    own: dict[str, Any] | None


def load_into(
    store: Store,
    found: NewestCheckpoint,
    state: dict[str, Any],
    world: World,
    group: dist.ProcessGroup,
    *,
    optional: Collection[str] = (),
) -> LoadedState:
    """Load a verified checkpoint; reject one that does not match before changing anything.

    A checkpoint that names its base model may lack the tensors named in ``optional``.
    """
    name = found.name
    tensors = flatten(state)[1]
    common: list[Any] = []

    def read_common() -> None:
        index = Index.from_json(read_small(store, name, INDEX, most_bytes=MOST_INDEX_BYTES))
        common.extend((index, _json(store, name, STATE)))
        if found.manifest.world_size == world.world_size:
            common.append(_json(store, name, file_of_rank(world.global_rank)))

    run_on_all_ranks(read_common, world, group)
    index, rest, own = (*common, None)[:3]
    saved = {one: one for one in index.tensors} | dict(index.tied)
    try:
        here = flatten(state)[0]
        never = never_stepped(rest, here)
        tensors = {one: tensor for one, tensor in tensors.items() if not one.startswith(never)}
        refuse_other_base(name, rest.get("base"), here.get("base"))
        if rest.get("base") is not None:
            of_base = set(optional) - saved.keys()
            tensors = {one: tensor for one, tensor in tensors.items() if one not in of_base}
        refuse_incompatible_state(name, index, tensors, saved=saved)
        once = shared_tensors(tensors)
        state_dict_loader.load(
            {one: tensor for one, tensor in tensors.items() if one not in once},
            storage_reader=Reader(store, name, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )
        return LoadedState(state=unflatten(rest, tensors), own=own)
    except CheckpointException as error:  # which is not an Exception
        rank, (first, _) = sorted(error.failures.items())[0]
        raise MusterError(f"rank {rank} could not read {name}", why=str(first)) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MusterError(
            f"{STATE} of {name} is not a training state",
            why=f"{type(error).__name__}: {error}",
        ) from None


def _json(store: Store, name: str, file: str) -> Any:
    try:
        return json.loads(read_small(store, name, file, most_bytes=_MOST_STATE_BYTES))
    except RecursionError:
        raise ValueError(f"cannot read {file}") from None
