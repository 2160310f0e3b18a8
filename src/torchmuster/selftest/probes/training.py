"""Steps of small models on the ranks of a check: strategies, precisions, skipped steps, waits, overhead, compile."""

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.torch_private import READ_VALUE
from torchmuster.selftest.probes.answering import Request, answer_request
from torchmuster.train.data.pytree import move_to_device
from torchmuster.train.data.step import MicroBatch, Step
from torchmuster.train.models.blocks import compile_blocks
from torchmuster.train.step import HostCopy, StepResult
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.train.torch_private import TorchDispatchMode
from torchmuster.train.world import World, gather_rows

MODEL = Work(
    build="torchmuster.bench.probes.small_gpt:make_small_gpt",
    loss="language_model",
    sequence_length=32,
)
_MEDIUM_GPT = "torchmuster.bench.probes.small_gpt:make_medium_gpt"
_VOCABULARY = 2048
_LENGTH = 32
_SAMPLES = 8  # of a whole step, for all ranks together
_STEPS = 5


def strategies(world: World, request: Request) -> dict[str, Any]:
    """Train the same steps with each strategy on all ranks, and alone on this rank's device."""
    losses = {"alone": _losses(_built(_by_itself(world), "single"), steps=_STEPS)}
    weights = {}
    reference = _weights(_by_itself(world), "single", scale=1.0)
    for name, candidate in _layouts(world).items():
        scale = 2.0 if request["planted"] and world.global_rank == 1 else 1.0
        built = build_step(MODEL, candidate, world)
        losses[name] = _losses(built, steps=_STEPS, scale=scale)
        weights[name] = _difference(_whole_weights(built), reference)
    return {"losses": losses, "weights": weights, "backend": world.backend}


def _by_itself(world: World) -> World:
    """Return this rank as a group of one."""
    return replace(world, global_rank=0, local_rank=0, world_size=1, local_world_size=1)


def _layouts(world: World) -> dict[str, Candidate]:
    size = world.world_size
    found = {
        "ddp": _candidate("ddp", ShardLayout(copies=size, shards=1)),
        "fsdp": _candidate("fsdp", ShardLayout(copies=1, shards=size)),
    }
    if size >= 4 and size % 2 == 0:
        found["hybrid"] = _candidate("fsdp", ShardLayout(copies=size // 2, shards=2))
    return found


def _ways(world: World) -> dict[str, Candidate | None]:
    """Return each strategy of the group, and None for this rank alone."""
    return {"alone": None, **_layouts(world)}


def _built_as(candidate: Candidate | None, world: World) -> BuiltStep:
    if candidate is None:
        return _built(_by_itself(world), "single")
    return build_step(MODEL, candidate, world)


def _candidate(strategy: str, layout: ShardLayout, precision: str = "fp32") -> Candidate:
    return Candidate(
        strategy=strategy,  # type: ignore[arg-type]
        layout=layout,
        precision=precision,  # type: ignore[arg-type]
        micro_batch_size=max(_SAMPLES // layout.ranks, 1),
    )


def _built(world: World, strategy: str, precision: str = "fp32") -> BuiltStep:
    return build_step(
        MODEL, _candidate(strategy, ShardLayout(copies=1, shards=1), precision), world
    )


def _batch(number: int, world: World) -> dict[str, torch.Tensor]:
    """Return this rank's part of a step's rows; the whole is the same for any number of ranks."""
    maker = torch.Generator().manual_seed(number)
    rows = torch.randint(_VOCABULARY, (_SAMPLES, _LENGTH), generator=maker)
    own = rows.chunk(world.world_size)[world.global_rank]
    return move_to_device({"input_ids": own, "labels": own}, world.device)  # type: ignore[no-any-return]


def _step(number: int, world: World) -> Step:
    batch = _batch(number, world)
    return Step(
        epoch=0,
        number=number,
        rounds=1,
        samples=_SAMPLES,
        nominal_samples=_SAMPLES,
        micro_batches=[MicroBatch(batch=batch, samples=len(batch["input_ids"]))],
    )


def _train(built: BuiltStep, number: int, scale: float = 1.0) -> tuple[torch.Tensor, StepResult]:
    """Run a step; return this rank's mean loss, and the result."""
    return _train_step(built, _step(number, built.world), scale)


def _train_step(
    built: BuiltStep, step: Step, scale: float = 1.0
) -> tuple[torch.Tensor, StepResult]:
    for micro in built.update.accumulate(step):
        loss, count = built.loss_of(micro.batch)
        built.update.backward(loss * scale, count)
    mean = loss.detach() if count is None else loss.detach() / count
    return mean, built.update.apply()


def _losses(built: BuiltStep, *, steps: int, scale: float = 1.0, first: int = 0) -> list[float]:
    """Return the mean loss of each step, over all ranks."""
    found = []
    for number in range(first, first + steps):
        loss, _ = _train(built, number, scale)
        rows = gather_rows(loss.reshape(1).double(), built.world)
        found.append(float(torch.cat(rows).mean()))
    return found


def _weights(world: World, strategy: str, *, scale: float) -> dict[str, torch.Tensor]:
    built = _built(world, strategy)
    _losses(built, steps=_STEPS, scale=scale)
    return _whole_weights(built)


def _whole_weights(built: BuiltStep) -> dict[str, torch.Tensor]:
    state = built.strategy.state_dict(built.model)["model"]
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().cpu()
        for name, one in state.items()
    }


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all weights, relative to theirs; infinite if names differ.

    Not per tensor: attention does not depend on the bias of its keys, which therefore gets nothing but rounding errors.
    """
    if ours.keys() != theirs.keys():
        return math.inf
    off = [(one.double() - theirs[name].double()).norm() for name, one in ours.items()]
    whole = [one.double().norm() for one in theirs.values()]
    return float(torch.stack(off).norm() / torch.stack(whole).norm())


_PRECISION_STEPS = {"cpu": 5}  # 20 on an accelerator; a CPU takes seconds for a step in fp16


def precisions(world: World, request: Request) -> dict[str, Any]:
    """Train the same steps in each precision, from the same weights."""
    losses, steps = {}, _PRECISION_STEPS.get(world.device.type, 20)
    for name in ("fp32", "bf16", "fp16"):
        if (
            name == "bf16"
            and world.device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            continue
        built = _built(_by_itself(world), "single", name)
        if request["planted"] and name == "bf16":
            for group in built.optimizer.param_groups:
                group["lr"] = group["lr"] * 3
        skipped, values, number = 0, [], 0
        while number < steps and skipped < 40:
            loss, result = _train(built, 0)  # the same rows, so that the loss falls
            if result.applied:
                values.append(float(loss))
                number += 1
            else:  # the loss scale was too large: the same step again
                skipped += 1
        losses[name] = values
    return {"losses": losses}


def skipped_step(world: World, request: Request) -> dict[str, Any]:
    """Give the last rank a gradient that is not finite in one step; compare the state before and after."""
    found: dict[str, Any] = {}
    for name, candidate in _ways(world).items():
        built = _built_as(candidate, world)
        _train(built, 0)
        before = _state(built)
        last = candidate is None or world.global_rank == world.world_size - 1
        _, result = _train(built, 1, scale=math.nan if last else 1.0)
        if request["planted"]:
            with torch.no_grad():
                next(built.model.parameters()).mul_(1.001)
        same = _equal(before, _state(built))
        _, later = _train(built, 2)
        moved = not _equal(before, _state(built))
        found[name] = {
            "applied": bool(result.applied),
            "same": same,
            "applied_later": bool(later.applied),
            "moved_later": moved,
        }
    return found


def _state(built: BuiltStep) -> list[torch.Tensor]:
    """Return copies of this rank's weights and optimizer states."""
    tensors = [one.detach() for one in built.model.parameters()]
    for state in built.optimizer.state.values():
        tensors += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return [(one.to_local() if hasattr(one, "to_local") else one).clone() for one in tensors]


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


_WATCHED_STEPS = {"cpu": 3}  # 10 on an accelerator; on a CPU each operation is watched in Python


def host_syncs(world: World, request: Request) -> dict[str, Any]:
    """Count how often the host waits for the device in steps of each strategy."""
    found = {}
    for name, candidate in _ways(world).items():
        built = _built_as(candidate, world)
        for number in range(3):  # ddp rebuilds its buckets, fsdp makes its buffers
            _train(built, number)
        steps = [
            _step(number, built.world)
            for number in range(_WATCHED_STEPS.get(world.device.type, 10))
        ]
        _settle(world)
        with _waits(world.device) as waits:
            for step in steps:
                loss, _ = _train_step(built, step)
                if request["planted"]:
                    loss.item()
        found[name] = sorted(set(waits))
    return found


def _settle(world: World) -> None:
    if world.device.type != "cpu":
        torch.accelerator.synchronize(world.device)


@contextlib.contextmanager
def _waits(device: torch.device) -> Iterator[list[str]]:
    """Collect what made the host wait: torch's own warnings on CUDA, reads of numbers on the CPU."""
    seen: list[str] = []
    if device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield seen
            finally:
                torch.cuda.set_sync_debug_mode(before)
        seen += [
            f"{one.filename.rpartition('/')[2]}:{one.lineno}"
            for one in caught
            if "called a synchronizing" in str(one.message)  # not the notice about this mode itself
        ]
        return
    with _Reads(seen), patch.object(HostCopy, "read", _unseen(seen, HostCopy.read)):
        yield seen


def _unseen(seen: list[str], read: Callable[[HostCopy], list[float]]) -> Any:
    """Return a read that does not count: a device sent these numbers a step earlier."""

    def reading(copy: HostCopy) -> list[float]:
        before = len(seen)
        numbers = read(copy)
        del seen[before:]
        return numbers

    return reading


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation whose result the host must know."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (READ_VALUE, torch.ops.aten.nonzero.default):
            self._seen.append(str(func))
        return func(*args, **(kwargs or {}))


_TURNS = 12
_STEPS_TIMED = {"cpu": 1}  # 10 on an accelerator: the host must be able to run ahead
_LARGER = {
    "cpu": MODEL
}  # a larger model on an accelerator: the time of a small one is that of starting kernels


def overhead(world: World, request: Request) -> dict[str, Any]:
    """Time steps of TrainStep and of a bare loop of torch, in turn, on the same model."""
    alone, kind = _by_itself(world), world.device.type
    work = _LARGER.get(kind, replace(MODEL, build=_MEDIUM_GPT, sequence_length=128))
    single = _candidate("single", ShardLayout(copies=1, shards=1))
    built = build_step(work, single, alone)
    batch = built.batch()
    step = replace(
        _step(0, alone), micro_batches=[MicroBatch(batch=batch, samples=single.micro_batch_size)]
    )
    bare = torch.optim.AdamW(built.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def bare_step() -> None:
        logits = built.model(batch["input_ids"])
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        loss.backward()  # type: ignore[no-untyped-call]
        bare.step()
        bare.zero_grad()

    def own_step() -> None:
        for _ in range(2 if request["planted"] else 1):
            _train_step(built, step)

    times: dict[str, list[float]] = {"bare": [], "torchmuster": []}
    steps = _STEPS_TIMED.get(kind, 10)
    for _ in range(_TURNS):
        for name, run_one in (("bare", bare_step), ("torchmuster", own_step)):
            _settle(world)
            begun = time.perf_counter()
            for _ in range(steps):
                run_one()
            _settle(world)
            times[name].append((time.perf_counter() - begun) / steps)
    return {name: statistics.median(taken[3:]) for name, taken in times.items()}


def compiled(world: World, request: Request) -> dict[str, Any]:
    """Train the same steps with and without torch.compile."""
    eager = _losses(_built(_by_itself(world), "single"), steps=_STEPS)
    built = _built(_by_itself(world), "single")
    compile_blocks(built.model, world.device)
    begun = time.perf_counter()
    losses = _losses(built, steps=_STEPS, first=1 if request["planted"] else 0)
    return {"eager": eager, "compiled": losses, "seconds": time.perf_counter() - begun}


def main() -> None:
    """Answer a request."""
    answer_request(
        {
            "strategies": strategies,
            "precisions": precisions,
            "skipped-step": skipped_step,
            "host-syncs": host_syncs,
            "overhead": overhead,
            "compile": compiled,
        }
    )


if __name__ == "__main__":
    main()
