"""Load a checkpoint into the tensors of a training state that is already distributed."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchmuster.checkpoints.base_model import refuse_other_base
from torchmuster.checkpoints.manifest import Manifest
from torchmuster.checkpoints.store import Store
from torchmuster.checkpoints.tensor_file import Index
from torchmuster.checkpoints.verify import (
    NewestCheckpoint,
    look_at_manifest,
    newest_first,
    verify_file,
)
from torchmuster.errors import Impossible, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.train.checkpointing.exchange import RankExchange, first_of, nothing
from torchmuster.train.checkpointing.flatten import flatten, shared_tensors, unflatten
from torchmuster.train.checkpointing.storage import DTYPES, STATE, own_file, read_json, read_tensors
from torchmuster.train.world import World


def newest_valid_checkpoint(
    store: Store, world: World, exchange: RankExchange
) -> NewestCheckpoint | None:
    """Return the newest checkpoint whose files are all intact; None if there is no checkpoint.

    Each rank reads its share of the files. If there are checkpoints and none of them is good, it
    raises an error: starting from scratch would silently discard all of them.
    """
    names = exchange.run(lambda: newest_first(store) if world.is_first else [], first_of)
    rejected: list[Finding] = []
    for name in names:
        manifest, findings = _verified_by_all(store, name, world, exchange)
        if not findings:
            assert manifest is not None  # else there would be a finding
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


def _verified_by_all(
    store: Store, name: str, world: World, exchange: RankExchange
) -> tuple[Manifest | None, list[Finding]]:
    """Return the manifest, and the findings of all ranks without duplicates."""
    manifest: Manifest | None = None

    def verify_share() -> list[dict[str, str]]:
        nonlocal manifest
        manifest, findings = look_at_manifest(store, name)
        if manifest is not None:
            files = sorted(manifest.files)
            for file in files[world.global_rank :: world.world_size]:
                findings += verify_file(store, name, file, manifest.files[file])
            if world.is_first and not findings:
                findings += _unreadable_checkpoint(store, name)
        return [one.as_json() for one in findings]

    found = exchange.run(verify_share, _without_duplicates)
    return manifest, [finding_of_rank(one) for one in found]


def _unreadable_checkpoint(store: Store, name: str) -> list[Finding]:
    """Return a finding if the files are as they were written, but are no training state: try an older one."""
    try:
        Index.read(store, name)
        if isinstance(read_json(store, name, STATE), dict):
            return []
        why = f"{STATE} is not a training state"
    except FileNotFoundError:
        return []  # the rank that verifies this file reports it
    except ValueError as error:
        why = str(error)
    return [
        Finding(
            name="checkpoint-unreadable",
            status=Status.FAILURE,
            what=f"{name} cannot be read, although its hashes match",
            why=why,
            fix="if a newer version of Muster wrote it, use that version; else an older checkpoint is used",
            evidence=f"{store.where}/{name}",
        )
    ]


def _without_duplicates(of_ranks: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    findings: dict[str, dict[str, str]] = {}
    for rank, theirs in enumerate(of_ranks):
        for one in theirs:
            evidence = f"{one['evidence']} (seen by rank {rank})"
            findings.setdefault(one["what"], {**one, "evidence": evidence})
    return list(findings.values())


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
    exchange: RankExchange,
    *,
    optional: Collection[str] = (),
) -> LoadedState:
    """Load a verified checkpoint; reject one that does not match before changing anything.

    A checkpoint that names its base model may lack the tensors named in ``optional``.
    """
    name = found.name
    here, tensors = flatten(state)
    common: list[Any] = []

    def read_common() -> None:
        common.extend((Index.read(store, name), read_json(store, name, STATE)))
        if found.manifest.world_size == world.world_size:
            common.append(read_json(store, name, own_file(world.global_rank)))

    exchange.run(read_common, nothing)
    index, rest, own = (*common, None)[:3]
    own_error: MusterError | None = None

    def compare_state() -> None:
        nonlocal own_error, tensors
        try:
            tensors = _fitting_tensors(name, index, rest, here, tensors, optional)
        except MusterError as error:
            own_error = error
            raise

    def read_own_parts() -> None:
        once = shared_tensors(tensors)
        mine = {one: tensor for one, tensor in tensors.items() if one not in once}
        read_tensors(store, name, index, found.manifest.files, mine)

    try:
        exchange.run(compare_state, nothing)
    except MusterError:
        if own_error is not None:
            raise own_error from None
        raise
    exchange.run(read_own_parts, nothing)
    with _as_state_error(name):
        return LoadedState(state=unflatten(rest, tensors), own=own)


def _fitting_tensors(
    name: str,
    index: Index,
    rest: Any,
    here: Any,
    tensors: dict[str, torch.Tensor],
    optional: Collection[str],
) -> dict[str, torch.Tensor]:
    """Return the tensors to load; raise if the checkpoint does not match them."""
    saved = {one: one for one in index.tensors} | dict(index.tied)
    with _as_state_error(name):
        never = never_stepped(rest, here)
        tensors = {one: tensor for one, tensor in tensors.items() if not one.startswith(never)}
        refuse_other_base(name, rest.get("base"), here.get("base"))
        if rest.get("base") is not None:
            of_base = set(optional) - saved.keys()
            tensors = {one: tensor for one, tensor in tensors.items() if one not in of_base}
        refuse_incompatible_state(name, index, tensors, saved=saved)
    return tensors


@contextmanager
def _as_state_error(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MusterError(
            f"{STATE} of {name} is not a training state",
            why=f"{type(error).__name__}: {error}",
        ) from None
