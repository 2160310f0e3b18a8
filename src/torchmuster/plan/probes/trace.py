"""Trace two training steps without memory: live storages, operations and collectives.

As a program it answers requests, one per line::

    python -m torchmuster.plan.probes.trace < requests > answers
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.cuda_kernels import as_on_cuda, fused_as_on_cuda
from torchmuster.plan.probes.fake_process_group import fake_process_group, masks_of_real_runs
from torchmuster.plan.probes.live_storage import LiveStorages, named_refusals
from torchmuster.plan.probes.peak_accounting import Replay, Roles, allocations, categories, timeline
from torchmuster.plan.probes.stages import Sized, Stage
from torchmuster.plan.record import Shape, TraceRecord, TraceRequest
from torchmuster.train.weights import own_name

# Each further rank costs time, and other numbers of shards can be computed from two.
MOST_SHARDS = 64
_RANKS_PER_MACHINE = 8  # a rank's memory does not depend on the placement of the others


def trace(request: TraceRequest, *, logs: Path | None = None) -> TraceRecord:
    """Trace two steps of rank 0; the second represents all later ones.

    ``logs`` is the folder of the allocation log, if the request wants it. An operation that cannot
    be traced without values raises an error with its name.
    """
    begun = time.perf_counter()
    candidate = request.candidate
    if candidate.layout.shards > MOST_SHARDS:
        raise Impossible(
            f"{candidate.layout.shards} shards are too many to trace",
            why=f"more than {MOST_SHARDS} take long to trace, and differ only in the shard sizes",
            fix=f"trace {MOST_SHARDS} or fewer, and compute the others from them",
        )
    seen = LiveStorages(answer=_value_read, on_host=request.kernels == "cpu")
    world_of = fake_process_group(
        candidate.layout.ranks,
        ranks_per_machine=_RANKS_PER_MACHINE,
        reduced=lambda bucket, ranks: seen.note_collective("all_reduce", bucket, ranks),
    )
    with named_refusals(seen), world_of as world:
        built = build_step(request.work, candidate, world, blocks=request.blocks)
        if request.kernels == "cuda" and not candidate.cpu_offload:
            as_on_cuda(built.optimizer)
        followed = _Followed(request, built, seen)
        with (
            masks_of_real_runs(packed=request.work.packed),
            fused_as_on_cuda(request.kernels),
        ):
            followed.train()
        return followed.record(logs, begun)


class _Followed:
    """A training run whose steps are traced."""

    def __init__(self, request: TraceRequest, built: BuiltStep, seen: LiveStorages) -> None:
        self.request = request
        self.built = built
        self.seen = seen
        self.begins: list[int] = []  # of each step, in the log
        self.parameters: set[int] = set()
        self.buffers: set[int] = set()
        self.gradients: set[int] = set()  # of both steps
        self.gradients_now: set[int] = set()  # of the last one
        self.logits: set[int] = set()
        self._note_states()

    def _note_states(self) -> None:
        model = self.built.model
        self.parameters = self._see(model.parameters())
        self.parameters |= self._see(four_bit.quantization_tensors(model))
        self.buffers = self._see(model.buffers()) - self.parameters
        for one in model.parameters():
            mesh = one.device_mesh if isinstance(one, DTensor) else None
            if mesh is not None and mesh.ndim > 1:
                self.seen.copies_group = mesh.get_group("copy").group_name

    def _see(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        storages = [_local(one).untyped_storage() for one in tensors]
        return {self.seen.see(one, "") for one in storages}

    def train(self) -> None:
        """Run two steps."""
        stages, built = self.seen.stages, self.built
        noted = built.model.register_forward_hook(self._note_logits)
        with self.seen.followed(), stages.followed(built):
            for number in range(2):
                self.begins.append(len(self.seen.log.events))
                for micro in built.update.accumulate(stages.of_step(built.step(number))):
                    loss, count = built.loss_of(micro.batch)
                    stages.begin("backward", stages.now.micro_batch)
                    built.update.backward(loss, count)
                    # DDP keeps those of earlier micro-batches in addition to its buckets.
                    self._note_gradients()
                stages.begin("check")
                built.update.apply()
        noted.remove()

    def _note_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        for one in _tensors(output):
            number = self.seen.number_of(one)
            if number is not None:
                self.logits.add(number)

    def _note_gradients(self) -> None:
        found = (one.grad for one in self.built.model.parameters() if one.grad is not None)
        numbers = {self.seen.number_of(one) for one in found}
        self.gradients_now = {one for one in numbers if one is not None}
        self.gradients |= self.gradients_now

    def record(self, logs: Path | None, begun: float) -> TraceRecord:
        """Build the record of the trace."""
        request, built, log = self.request, self.built, self.seen.log
        states = [
            one
            for state in built.optimizer.state.values()
            for one in state.values()
            if isinstance(one, torch.Tensor)
        ]
        optimizer = {number for one in states if (number := self.seen.number_of(one)) is not None}
        roles = Roles(
            parameters=frozenset(self.parameters | self.buffers),
            gradients=frozenset(self.gradients),
            optimizer=frozenset(optimizer),
            logits=frozenset(self.logits),
            has_blocks=bool(built.blocks),
        )
        of_category = categories(log, roles)
        first, second = self.begins
        on_host = self._on_host(roles)
        replay = Replay(of_category, ignored=on_host)
        replay.peaks(log.events[:first], Stage())
        first_step = replay.peaks(log.events[first:second], Stage())
        peaks = replay.peaks(log.events[second:], Stage())
        sizes = self._sizes(roles)
        return TraceRecord(
            request=request,
            torch=str(torch.__version__),
            blocks_traced=len(built.blocks),
            blocks=built.depth.blocks,
            blocks_alike=built.depth.alike,
            parameters=tuple(self._shapes()),
            parameter_count=built.parameter_count,
            trained_count=built.trained_count,
            samples_per_micro_batch=request.candidate.micro_batch_size,
            tokens_per_sample=request.work.sequence_length,
            states=sizes,
            first_step_peak_bytes=max(one.peak_bytes for one in first_step),
            peaks=peaks,
            timeline=timeline(log.events[second:], Stage()),
            host_bytes=self._host_bytes(sizes),
            log=self._write_log(logs, of_category, on_host),
            took_s=time.perf_counter() - begun,
        )

    def _on_host(self, roles: Roles) -> frozenset[int]:
        """Return the storages that are not on the accelerator: those offloaded to the host."""
        if not self.request.candidate.cpu_offload or self.request.kernels == "cpu":
            return frozenset()
        updating = (
            number
            for number, one in enumerate(self.seen.log.storages)
            if one.made_in.phase in ("check", "update")
        )
        shards = frozenset(self.parameters)
        return shards | roles.gradients | roles.optimizer | frozenset(updating)

    def _sizes(self, roles: Roles) -> dict[str, int]:
        """Return the bytes of the model's and the optimizer's states, and of the gradients."""
        largest: dict[int, int] = {}
        for event in self.seen.log.events:
            if isinstance(event, Sized):
                largest[event.number] = max(largest.get(event.number, 0), event.size_bytes)

        def together(numbers: Iterable[int]) -> int:
            return sum(largest.get(one, 0) for one in numbers)

        return {
            "parameters": together(self.parameters),
            "gradients": together(self.gradients_now),
            "optimizer": together(roles.optimizer),
            "buffers": together(self.buffers),
        }

    def _host_bytes(self, sizes: dict[str, int]) -> int:
        if not self.request.candidate.cpu_offload:
            return 0
        return sizes["parameters"] + sizes["gradients"] + sizes["optimizer"]

    def _shapes(self) -> Iterable[Shape]:
        whole = self.built.depth.blocks
        owners = {
            id(one): number
            for number, block in enumerate(self.built.blocks)
            for one in block.parameters()
        }
        for name, one in self.built.model.named_parameters():
            block = owners.get(id(one))
            unpacked = four_bit.whole_shape(one)
            yield Shape(
                name=own_name(name),
                shape=unpacked or tuple(one.shape),
                dtype="nf4" if unpacked else str(one.dtype).removeprefix("torch."),
                trained=one.requires_grad,
                block=block,
                copies=whole if block is not None and self.built.depth.alike else 1,
            )

    def _write_log(
        self, logs: Path | None, of_category: Any, on_host: frozenset[int]
    ) -> str | None:
        if logs is None or not self.request.keep_log:
            return None
        logs.mkdir(parents=True, exist_ok=True)
        steps = {place: number for number, place in enumerate(self.begins)}
        lines = allocations(self.seen.log, of_category, on_host, steps)
        # A unique name: the same request may be for another model, or traced by another process.
        handle, path = tempfile.mkstemp(prefix="trace-", suffix=".jsonl", dir=logs)
        with os.fdopen(handle, "wb") as file:
            file.write(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
        return path


def _value_read(stage: Stage) -> float | None:
    """Return a substitute for a value that is read, if it changes no size."""
    if stage.phase == "check":
        return 0.0  # nothing overflowed, and the ranks agree
    if stage.phase == "update":
        return 1.0  # the number of the step
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from _tensors(one)
    elif isinstance(tree, tuple | list):
        for one in tree:
            yield from _tensors(one)


def answer(line: bytes, logs: Path | None) -> dict[str, Any]:
    """Return the answer to one request line: a record, or the reason for its failure."""
    request = msgspec.json.decode(line, type=TraceRequest)
    try:
        return {"record": trace(request, logs=logs)}
    except MusterError as error:
        return {"refused": {"what": error.what, "why": error.why, "fix": error.fix}}
    except Exception as error:
        return {
            "refused": {
                "what": f"this model's training cannot be traced: {type(error).__name__}",
                "why": str(error).strip() or type(error).__name__,
                "fix": "check that it trains: muster train; if it does, report this as a bug",
            }
        }


def main() -> None:
    """Answer requests from stdin on stdout, one per line; a model's output goes to stderr."""
    logs = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    answers = sys.stdout.buffer
    freeze_objects()
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin.buffer:
            answers.write(msgspec.json.encode(answer(line, logs)) + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
