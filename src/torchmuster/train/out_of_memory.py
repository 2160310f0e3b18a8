"""Out of memory, told with who, where, how much was asked for, what takes the room, and what to change."""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchmuster.errors import OutOfMemory
from torchmuster.train.memory import MemoryTable, memory_table
from torchmuster.train.world import World
from torchmuster.units import format_bytes, parse_bytes

_WORDS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "enforce fail at alloc_cpu.cpp",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_BYTES_ASKED = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_SIZE_ASKED = re.compile(r"tried to allocate ([\d.]+ ?[KMGT]?i?B)", re.IGNORECASE)
# The outermost of these in a traceback says what was being done. Paths are those of torch and of this room.
_PHASES = (
    ("/torchmuster/train/models/meta_init.py", "while the model got its values"),
    ("/torchmuster/train/strategies/placing.py", "while the model got its values"),
    ("/torch/autograd/", "in the backward"),
    ("/torch/_tensor.py", "in the backward"),
    ("/torch/optim/", "in the optimiser's step"),
    ("/torch/nn/utils/clip_grad.py", "in clipping the gradients"),
    ("/torch/nn/parallel/distributed.py", "in the forward"),
    ("/torch/nn/modules/", "in the forward"),
    ("/torch/distributed/", "in communication"),
    ("/torch/utils/data/", "in loading data"),
)


def recognise(error: BaseException) -> bool:
    """Say whether an error means that memory has run out, on an accelerator or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def naming_memory(
    world: World,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    micro_batch_size: int | None = None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside the ``with`` into one that shows this rank's memory table.

    It leaves as an exception, so that the rank ends at once; ranks that wait for it are ended by the
    launcher, be it ``muster run`` or torchrun.
    """
    # In the middle of a step whole copies take the places of some shards, so these are noted before.
    shards = list(model.parameters()) if model is not None and _is_sharded(model) else None
    try:
        yield
    except Exception as error:
        if not recognise(error):
            raise
        table = memory_table(model, optimizer, world.device, shards=shards)
        sharded = model is not None and _is_sharded(model)
        raise explained(
            error, table, world, sharded=sharded, micro_batch_size=micro_batch_size
        ) from error


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(one, FSDPModule) for one in model.modules())


def explained(
    error: BaseException,
    table: MemoryTable,
    world: World,
    *,
    sharded: bool = False,
    micro_batch_size: int | None = None,
) -> OutOfMemory:
    """Return the error that says it all."""
    asked = _asked(str(error))
    amount = f", asked for {format_bytes(asked)}" if asked is not None else ""
    phase = _phase(error.__traceback__)
    return OutOfMemory(
        f"rank {world.global_rank} on {platform.node()} ({world.device}) ran out of memory {phase}{amount}",
        why="\n".join(table.lines()),
        fix="\n".join(_fixes(table, world, sharded, micro_batch_size)),
    )


def _asked(text: str) -> int | None:
    if found := _BYTES_ASKED.search(text):
        return int(found[1])
    found = _SIZE_ASKED.search(text)
    return parse_bytes(found[1]) if found else None


def _phase(trace: TracebackType | None) -> str:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        for part, phase in _PHASES:
            if part in file:
                return phase
        trace = trace.tb_next
    return "outside of the model"


def _fixes(
    table: MemoryTable, world: World, sharded: bool, micro_batch_size: int | None
) -> Iterator[str]:
    """Yield what to change, what helps most first."""
    rest = table.rest_bytes or 0
    for_states = list(_less_states(table, world, sharded))
    for_activations = list(_less_activations(micro_batch_size))
    if table.states_bytes > rest:
        yield from for_states + for_activations
    else:
        yield from for_activations + for_states
    if table.reserved_bytes and table.used_bytes and table.reserved_bytes > 1.3 * table.used_bytes:
        yield (
            f"{format_bytes(table.reserved_bytes - table.used_bytes)} are reserved in pieces that do not "
            "fit: set PYTORCH_ALLOC_CONF=expandable_segments:True"
        )


def _less_states(table: MemoryTable, world: World, sharded: bool) -> Iterator[str]:
    size = format_bytes(table.states_bytes)
    if sharded:
        yield f"more ranks: each keeps a share of the {size} that stay between steps"
        yield "shards in the host's memory (distributed.fsdp_cpu_offload: true)"
    elif world.world_size > 1:
        share = format_bytes(table.states_bytes // world.world_size)
        yield (
            f"fsdp: of the {size} that stay between steps, each of {world.world_size} ranks keeps {share} "
            "(distributed.strategy: fsdp)"
        )
    else:
        yield (
            f"fsdp on several ranks: each keeps a share of the {size} that stay between steps "
            "(distributed.strategy: fsdp)"
        )


def _less_activations(micro_batch_size: int | None) -> Iterator[str]:
    if micro_batch_size is not None and micro_batch_size > 1:
        half = micro_batch_size // 2
        yield (
            f"a micro-batch of {half} instead of {micro_batch_size}, with twice the accumulation: the same "
            f"step with half the activations (train.micro_batch_size: {half})"
        )
    elif micro_batch_size is None:
        yield (
            "a smaller micro-batch with more accumulation: the same step with fewer activations at a time "
            "(train.micro_batch_size)"
        )
    yield "recompute activations (train.activation_checkpointing: full, or selective)"
    yield "bf16 instead of fp32: half the activations (train.precision: bf16)"
