"""Trace a training step without memory."""

import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import torchmuster
from torchmuster.errors import Impossible, MusterError
from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.build_step import BuiltStep, build_step
from torchmuster.plan.probes.cuda_kernels import as_on_cuda, fused_as_on_cuda
from torchmuster.plan.probes.fake_process_group import fake_process_group, masks_of_real_runs
from torchmuster.plan.probes.operations import tensors_in
from torchmuster.plan.probes.step_tracer import HOST, StepTracer, local_part
from torchmuster.plan.record import Shape, TraceRecord, TraceRequest
from torchmuster.plan.torch_private import CANNOT_FOLLOW, READ_VALUE

_NOT_THE_MODELS = (str(Path(torch.__file__).parent), str(Path(torchmuster.__file__).parent))


def trace(request: TraceRequest) -> TraceRecord:
    """Trace a step of rank 0, with all that the first step leaves behind.

    An operation that cannot be traced without values raises an error with its line of code.
    """
    candidate = request.candidate
    on_cuda = request.kernels == "cuda"
    tracer = StepTracer(
        on_host=not on_cuda,
        offload=candidate.cpu_offload and on_cuda,
        # Nothing overflowed and the ranks agree; the number of the step.
        values={"check": 0.0, "update": 1.0},
    )
    layout = candidate.layout
    group = fake_process_group(
        layout.ranks,
        ranks_per_machine=layout.shards,  # as hybrid shards; else the placement has no effect
        reduced=lambda bucket: tracer.note_sent("copies", 2 * bucket.nbytes),
    )
    try:
        with group as world:
            built = build_step(request.work, candidate, world, blocks=request.blocks)
            if on_cuda and not candidate.cpu_offload:
                as_on_cuda(built.optimizer)
            states = [*built.model.parameters(), *built.model.buffers()]
            for tensor in (*states, *four_bit.quantization_tensors(built.model)):
                on_host = candidate.cpu_offload and on_cuda
                tracer.see_tensor(tensor, HOST if on_host else "parameters")
            input_bytes = 0
            masks = masks_of_real_runs(packed=request.work.packed)
            if request.steps:
                with masks, fused_as_on_cuda(request.kernels):
                    input_bytes = _train(built, tracer)
            return _record(request, built, tracer, input_bytes)
    except CANNOT_FOLLOW as error:
        raise _refusal(error, tracer) from error


def _train(built: BuiltStep, tracer: StepTracer) -> int:
    """Run a step as all after the first are; return the bytes of a micro-batch's inputs."""
    with tracer.followed(), tracer.stages_of(built):
        if built.candidate.strategy == "ddp":
            _step(built, tracer)  # the first backward fills DDP's buckets
            return _step(built, tracer)
        for parameter in built.model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        built.optimizer.step()  # creates its states
        built.optimizer.zero_grad()
        # Training keeps the micro-batches of a step until the next one has been applied.
        before = [built.batch() for _ in range(built.candidate.accumulation)]
        input_bytes = _step(built, tracer)
        del before
        return input_bytes


def _step(built: BuiltStep, tracer: StepTracer) -> int:
    tracer.begin_step()
    input_bytes = 0
    for micro in built.update.accumulate(tracer.with_stages(built.step())):
        input_bytes = _bytes_of(tensors_in([micro.batch]))
        loss, count = built.loss_of(micro.batch)
        tracer.begin("backward", tracer.stage.micro_batch)
        built.update.backward(loss, count)
    tracer.begin("check")
    built.update.apply()
    tracer.note_peak()
    return input_bytes


def _record(
    request: TraceRequest, built: BuiltStep, tracer: StepTracer, input_bytes: int
) -> TraceRecord:
    host_bytes = 0
    if request.candidate.cpu_offload:
        trained = [weight for weight in built.model.parameters() if weight.requires_grad]
        moments = tensors_in(built.optimizer.state.values())
        host_bytes = _bytes_of([*built.model.parameters(), *trained, *moments])
    return TraceRecord(
        request=request,
        blocks_traced=len(built.blocks),
        blocks=built.whole.blocks,
        parameters=tuple(_shapes(built)),
        parameter_count=built.whole.parameters,
        trained_count=built.whole.trained,
        input_bytes=input_bytes,
        host_bytes=host_bytes,
        peaks=tuple(tracer.peaks.values()),
        costs=tracer.costs,
    )


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


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
            block=owners.get(id(parameter)),
        )


def _refusal(error: Exception, tracer: StepTracer) -> Impossible:
    """Return the error that names the operation and the line of the model's code."""
    operation = str(getattr(error, "func", None) or (error.args or (error,))[0])
    if READ_VALUE.overloadpacket.__name__ in operation:
        operation += " (.item(), float() or an if)"
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(_NOT_THE_MODELS):
            where = f" at {Path(frame.filename).name}:{frame.lineno}"
    return Impossible(
        f"this model cannot be traced without values{where}, {tracer.stage.phase}",
        why=f"{operation} depends on tensor values, or its output shape is unknown",
        fix="remove .item(), nonzero() and similar calls from the forward pass; or measure "
        "with real steps: muster plan --find-batch-size on the hardware itself",
    )


def trace_or_error(request: TraceRequest) -> TraceRecord | MusterError:
    """Trace a step of rank 0; an exception of any kind becomes an error to show to the user."""
    try:
        return trace(request)
    except MusterError as error:
        return error
    except Exception as error:
        return Impossible(
            f"this model's training cannot be traced: {type(error).__name__}",
            why=str(error).strip(),
            fix="check that it trains: muster train; if it does, report this as a bug",
        )
