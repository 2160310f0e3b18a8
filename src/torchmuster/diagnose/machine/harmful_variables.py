"""Switches that somebody turned on to find an error, and that make every later run slow or hang."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torchmuster.devices.model import LinkKind, Node
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.machine import infiniband
from torchmuster.finding import Finding, Status
from torchmuster.redaction import redact_text

Applies = Callable[[str, Node, Surroundings], bool]


def _on(value: str, node: Node, surroundings: Surroundings) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y")


def _off(value: str, node: Node, surroundings: Surroundings) -> bool:
    return value == "0"


def _on_beside_nvlink(value: str, node: Node, surroundings: Surroundings) -> bool:
    return value == "1" and any(link.kind is LinkKind.NVLINK for link in node.links)


def _on_with_gpus(value: str, node: Node, surroundings: Surroundings) -> bool:
    return value == "1" and len(node.accelerators) > 1


def _infiniband_in_use(surroundings: Surroundings) -> bool:
    ports = infiniband.port_folders(surroundings).values()
    return any(infiniband.is_active(port) and infiniband.is_infiniband(port) for port in ports)


def _on_beside_infiniband(value: str, node: Node, surroundings: Surroundings) -> bool:
    return value == "1" and _infiniband_in_use(surroundings)


def _on_beside_other_cards(value: str, node: Node, surroundings: Surroundings) -> bool:
    # The Ethernet of many virtual machines in clouds is such a card too.
    there = bool(infiniband.port_folders(surroundings))
    return value == "1" and there and not _infiniband_in_use(surroundings)


def _is(*words: str) -> Applies:
    return lambda value, node, surroundings: value.upper() in words


def _set(value: str, node: Node, surroundings: Surroundings) -> bool:
    return bool(value)


@dataclass(frozen=True, kw_only=True)
class Harm:
    """A variable, when it does harm, and which."""

    variable: str
    applies: Applies
    why: str
    status: Status = Status.WARNING


HARMS = (
    Harm(
        variable="CUDA_LAUNCH_BLOCKING",
        applies=_on,
        why="each kernel waits for the last one to end; good for finding an error, several times slower",
    ),
    Harm(
        variable="PYTORCH_NO_CUDA_MEMORY_CACHING",
        applies=_on,
        why="each tensor asks the driver for its memory, which is many times slower",
    ),
    Harm(
        variable="TORCH_DISTRIBUTED_DEBUG",
        applies=_is("DETAIL"),
        why="each collective is first compared between all ranks; good for finding an error, slow",
    ),
    Harm(
        variable="TORCH_NCCL_BLOCKING_WAIT",
        applies=_on,
        why="each collective stops the CPU until it has ended, so nothing overlaps with it",
    ),
    Harm(
        variable="NCCL_BLOCKING_WAIT",
        applies=_on,
        why="each collective stops the CPU until it has ended, so nothing overlaps with it",
    ),
    Harm(
        variable="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        applies=_off,
        why="a rank whose peer has died waits for ever instead of ending",
    ),
    Harm(
        variable="NCCL_ASYNC_ERROR_HANDLING",
        applies=_off,
        why="a rank whose peer has died waits for ever instead of ending",
    ),
    Harm(
        variable="NCCL_P2P_DISABLE",
        applies=_on_beside_nvlink,
        why="the GPUs here are joined by NVLink, and it is not used: everything goes through the CPU's "
        "memory",
    ),
    Harm(
        variable="NCCL_SHM_DISABLE",
        applies=_on_with_gpus,
        why="GPUs that cannot reach each other directly go through the network instead of memory",
    ),
    Harm(
        variable="NCCL_IB_DISABLE",
        applies=_on_beside_infiniband,
        why="this machine has InfiniBand, and NCCL uses plain TCP instead",
    ),
    Harm(
        variable="NCCL_IB_DISABLE",
        applies=_on_beside_other_cards,
        why="this machine has a card that may be meant for RoCE, and NCCL uses plain TCP instead",
        status=Status.NOTE,
    ),
    Harm(
        variable="NVIDIA_TF32_OVERRIDE",
        applies=_set,
        why="it overrules what the script chooses for the precision of every matrix product",
    ),
    Harm(
        variable="NCCL_DEBUG",
        applies=_is("INFO", "TRACE"),
        why="every rank writes many lines",
        status=Status.NOTE,
    ),
    Harm(
        variable="NCCL_ALGO",
        applies=_set,
        why="NCCL no longer chooses by itself what is fastest",
        status=Status.NOTE,
    ),
    Harm(
        variable="NCCL_PROTO",
        applies=_set,
        why="NCCL no longer chooses by itself; LL128 where the hardware lacks it gives wrong values",
        status=Status.NOTE,
    ),
)


def _harmful(surroundings: Surroundings) -> Iterator[Finding]:
    node, environment = surroundings.look(), surroundings.environment
    found = [
        Finding(
            name="harmful-variable",
            status=one.status,
            what=f"{one.variable}={environment[one.variable]} is set",
            why=one.why,
            fix=f"unset {one.variable}",
        )
        for one in HARMS
        if one.variable in environment
        and one.applies(environment[one.variable], node, surroundings)
    ]
    found += _allocator(environment)
    yield from found
    if all(one.status is Status.NOTE for one in found):
        yield Finding(name="variables", status=Status.OK, what="none that slows a run down")


# What torch 2.13 reads of PYTORCH_CUDA_ALLOC_CONF, by the words in its libraries.
_ALLOCATOR_KEYS = {
    *("backend", "max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold"),
    *("roundup_power2_divisions", "roundup_bypass_threshold_mb", "expandable_segments"),
    *(
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
    ),
    *(
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    ),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "large_segment_size_mb"),
    *("graph_capture_record_stream_reuse", "per_process_memory_fraction"),
    *("throw_on_cudamalloc_oom", "pinned_use_hip_host_register"),
}


def _allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield options of torch's allocator that it does not have; a newer torch may have more."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        items = environment.get(variable, "").split(",")
        keys = [item.partition(":")[0].strip() for item in items if ":" in item]
        for key in keys:
            # roundup_power2_divisions:[256:1,512:2] has numbers where keys would be
            if key in _ALLOCATOR_KEYS or not key.isidentifier():
                continue
            meant = next(iter(difflib.get_close_matches(key, _ALLOCATOR_KEYS, 1, 0.8)), None)
            yield Finding(
                name="unknown-allocator-option",
                status=Status.WARNING if meant else Status.NOTE,
                what=f"{variable} has {key}, which torch's allocator is not known to have",
                why="torch ends with “Unrecognized key” as soon as it uses a GPU",
                fix=f"write {meant} instead of {key}" if meant else f"unset {variable}",
                evidence=f"{variable}={redact_text(environment[variable])}",
            )


CHECKS = (
    Check(
        name="harmful-variables",
        asks="Is a variable set that makes runs slow, or hang where they should fail?",
        run=_harmful,
    ),
)
