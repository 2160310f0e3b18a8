"""Trace two training steps without memory: live storages, operations and collectives.

As a program it answers requests, one per line::

    python -m torchmuster.plan.probes.trace < requests > answers
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchmuster.errors import MusterError
from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.cuda_kernels import as_on_cuda, fused_as_on_cuda, unpatched_functions
from torchmuster.plan.probes.fake_process_group import fake_process_group, masks_of_real_runs
from torchmuster.plan.probes.live_storage import HOST, LiveStorages, local_part, named_refusals
from torchmuster.plan.probes.stages import Stage, tensors_of
from torchmuster.plan.record import Cost, Part, Peak, Shape, TraceRecord, TraceRequest

_RANKS_PER_MACHINE = 8  # a rank's memory does not depend on the placement of the others


def trace(request: TraceRequest) -> TraceRecord:
    """Trace two steps of rank 0; the second represents all later ones.

    An operation that cannot be traced without values raises an error with its name.
    """
    candidate = request.candidate
    offload = candidate.cpu_offload and request.kernels == "cuda"
    seen = LiveStorages(answer=_value_read, on_host=request.kernels == "cpu", offload=offload)
    group = fake_process_group(
        candidate.layout.ranks,
        ranks_per_machine=_RANKS_PER_MACHINE,
        reduced=lambda bucket, ranks: seen.note_all_reduce(bucket.numel() * bucket.itemsize),
    )
    with named_refusals(seen), group as world:
        built = build_step(request.work, candidate, world, blocks=request.blocks)
        if request.kernels == "cuda" and not candidate.cpu_offload:
            as_on_cuda(built.optimizer)
        _see_states(built.model, seen, "parameters" if not offload else HOST)
        with (
            masks_of_real_runs(packed=request.work.packed),
            fused_as_on_cuda(request.kernels),
        ):
            input_bytes = _train(built, seen)
        return _record(request, built, seen, input_bytes)


def _see_states(model: nn.Module, seen: LiveStorages, category: str) -> None:
    for tensor in (
        *model.parameters(),
        *model.buffers(),
        *four_bit.quantization_tensors(model),
    ):
        seen.see_tensor(tensor, category)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            seen.copies_group = parameter.device_mesh.get_group("copy").group_name
            return


def _train(built: BuiltStep, seen: LiveStorages) -> int:
    """Run two steps; return the bytes of the inputs of a micro-batch."""
    input_bytes = 0

    def note_logits(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            seen.see_tensor(tensor, "logits")

    noted = built.model.register_forward_hook(note_logits)
    with seen.followed(), seen.stages.followed(built):
        for number in range(2):
            seen.begin_step()
            for micro in built.update.accumulate(seen.stages.of_step(built.step(number))):
                input_bytes = _bytes_of(tensors_of(micro.batch))
                loss, count = built.loss_of(micro.batch)
                seen.stages.begin("backward", seen.stages.now.micro_batch)
                built.update.backward(loss, count)
            seen.stages.begin("check")
            built.update.apply()
        seen.note_peak()
    noted.remove()
    return input_bytes


def _record(
    request: TraceRequest, built: BuiltStep, seen: LiveStorages, input_bytes: int
) -> TraceRecord:
    peaks = []
    for stage, level in seen.peaks.items():
        peaks.append(Peak(
            phase=stage.phase,
            micro_batch=stage.micro_batch,
            block=stage.block,
            after_block=stage.after_block,
            peak_bytes=level.total_bytes,
            by_category={name: size for name, size in level.by_category.items() if size},
        ))  # fmt: skip
    return TraceRecord(
        request=request,
        blocks_traced=len(built.blocks),
        blocks=built.depth.blocks,
        blocks_alike=built.depth.alike,
        parameters=tuple(_shapes(built)),
        parameter_count=built.parameter_count,
        trained_count=built.trained_count,
        tokens_per_sample=request.work.sequence_length,
        input_bytes=input_bytes,
        host_bytes=_host_bytes(built) if request.candidate.cpu_offload else 0,
        peaks=tuple(peaks),
        costs=_costs(request, seen),
        warnings=tuple(unpatched_functions(built.model)) if request.kernels == "cuda" else (),
    )


def _costs(request: TraceRequest, seen: LiveStorages) -> dict[Part, Cost]:
    costs: dict[Part, Cost] = {}
    last = request.candidate.accumulation - 1
    for (phase, micro_batch), work in seen.work.items():
        if phase == "update":
            costs["update"] = work.cost()
        elif micro_batch == last:
            costs["last"] = work.cost()
        elif micro_batch == 0:
            costs["first"] = work.cost()
    return costs


def _host_bytes(built: BuiltStep) -> int:
    """Return the host memory of offloaded shards, their gradients and the optimizer's states."""
    trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
    states: list[torch.Tensor] = []
    for state in built.optimizer.state.values():
        states += tensors_of(state)
    return _bytes_of([*built.model.parameters(), *trained, *states])


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        local = local_part(tensor)
        total += local.numel() * local.itemsize
    return total


def _shapes(built: BuiltStep) -> Iterator[Shape]:
    owners = {}
    for number, block in enumerate(built.blocks):
        for parameter in block.parameters():
            owners[id(parameter)] = number
    for parameter in built.model.parameters():
        unpacked = four_bit.whole_shape(parameter)
        yield Shape(
            shape=unpacked or tuple(parameter.shape),
            dtype="nf4" if unpacked else str(parameter.dtype).removeprefix("torch."),
            trained=parameter.requires_grad,
            block=owners.get(id(parameter)),
        )


def _value_read(stage: Stage) -> float | None:
    """Return a substitute for a value that is read, if it changes no size."""
    if stage.phase == "check":
        return 0.0  # nothing overflowed, and the ranks agree
    if stage.phase == "update":
        return 1.0  # the number of the step
    return None


def answer(line: bytes) -> dict[str, Any]:
    """Return the answer to one request line: a record, or the reason for its failure."""
    request = msgspec.json.decode(line, type=TraceRequest)
    try:
        return {"record": trace(request)}
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


def answers_only() -> BinaryIO:
    """Return standard output for answers; whatever else writes to descriptor 1 goes to stderr.

    A model's code, a C library or a subprocess may write there, and would break an answer.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Answer requests from stdin, one per line."""
    answers = answers_only()
    freeze_objects()
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(answer(line)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
