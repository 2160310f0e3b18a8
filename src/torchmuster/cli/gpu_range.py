"""``--num-gpus MIN:MAX`` and ``--borrow``: jobs that use more GPUs than they need if these are idle."""

import argparse
import dataclasses
import os
from collections.abc import Sequence

from torchmuster.config.resolve import Resolved
from torchmuster.devices.claims import TOKEN_VARIABLE
from torchmuster.errors import Impossible
from torchmuster.launch.job import JobSpec
from torchmuster.units import parse_seconds

_MOST_GPUS = 256  # of one host


def useful_counts(
    least: int, most: int, *, global_batch_size: int, micro_batch_size: int | None = None
) -> tuple[int, ...]:
    """Return the numbers of ranks that make a step faster than fewer ranks do, from ``least`` on.

    The slowest rank determines the time of a step: with 16 samples, 6 ranks take as long as 7, as some rank computes 3.
    """
    counts, fastest = [least], _samples_of_slowest(least, global_batch_size, micro_batch_size)
    for count in range(least + 1, most + 1):
        samples = _samples_of_slowest(count, global_batch_size, micro_batch_size)
        if samples < fastest:
            counts.append(count)
            fastest = samples
    return tuple(counts)


def _samples_of_slowest(ranks: int, whole: int, micro: int | None) -> int:
    """Return the samples that the slowest rank computes in a step; rounds have almost equal sizes."""
    at_once = ranks * (micro or -(-whole // ranks))
    rounds = -(-whole // at_once)
    each, larger = divmod(whole, rounds)
    return larger * -(-(each + 1) // ranks) + (rounds - larger) * -(-each // ranks)


def with_gpu_range(
    spec: JobSpec, options: argparse.Namespace, resolved: Resolved, *, is_training: bool
) -> JobSpec:
    """Return the job with the numbers of ranks that it may have; refuse what cannot be borrowed."""
    distributed, launch = resolved.settings.distributed, resolved.settings.launch
    least, most = distributed.num_gpus, distributed.max_gpus
    if launch.borrow:
        _refuse_to_borrow(spec, options, resolved, is_training=is_training)
    elif most is None:
        return spec
    asked = "--borrow" if launch.borrow else "a range of GPUs"
    if least is None:
        raise Impossible(
            f"{asked} was given without the number of GPUs that the run keeps",
            fix="give both numbers: --num-gpus 2:8, which keeps 2 GPUs and uses up to 8",
        )
    if most is not None and most < least:
        raise Impossible(
            f"{least}:{most} is not a range of GPUs",
            why="the first number is the minimum, the second the maximum",
            fix=f"--num-gpus {most}:{least}",
        )
    for is_given, name in (
        (bool(spec.hosts), "--hosts"),
        (bool(getattr(options, "slurm", False)) or "SLURM_JOB_ID" in os.environ, "Slurm"),
        (spec.gpu_ids is not None, "--gpu-ids"),
        (spec.device == "cpu", "--device cpu"),
        (spec.spares > 0, "--spares"),
    ):
        if is_given:
            raise Impossible(
                f"{asked} does not work with {name}",
                why="the number of GPUs may change only on this host, among all of its GPUs",
                fix=f"leave out one of the two; to use a fixed number: --num-gpus {least}",
            )
    highest = min(most or _MOST_GPUS, _MOST_GPUS)
    counts: Sequence[int] = range(least, highest + 1)
    train = resolved.settings.train
    if is_training and train.global_batch_size is not None:
        counts = useful_counts(
            least,
            highest,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
        )
    if is_training and distributed.fsdp_shard_size is not None:
        counts = [n for n in counts if n == least or n % distributed.fsdp_shard_size == 0]
    try:
        every_s = parse_seconds(launch.borrow_every)
    except ValueError as error:
        raise Impossible(
            f"launch.borrow_every: {error}", fix="--set launch.borrow_every=5min"
        ) from None
    return dataclasses.replace(
        spec, rank_counts=tuple(counts), borrow=launch.borrow, borrow_every_s=every_s
    )


def _refuse_to_borrow(
    spec: JobSpec, options: argparse.Namespace, resolved: Resolved, *, is_training: bool
) -> None:
    """Raise if a run would not have the same losses after its number of ranks has changed."""
    settings = resolved.settings
    if not is_training:
        raise Impossible(
            "muster run cannot borrow GPUs",
            why="to give GPUs back, a run saves a checkpoint and restarts on fewer ranks. What a script computes depends on "
            "its number of ranks, so its losses would change",
            fix="use muster train --num-gpus 2:8 --borrow\n"
            "or take the GPUs that are free now and keep them: muster run --num-gpus 2:8 …",
        )
    if not settings.distributed.enabled:
        problem, fix = "distributed.enabled is false", "--set distributed.enabled=true"
    elif not settings.checkpoint.enabled:
        problem, fix = "checkpoint.enabled is false", "--set checkpoint.enabled=true"
    elif settings.train.micro_batch_sizes is not None:
        problem = "train.micro_batch_sizes has one size for each rank"
        fix = "give train.micro_batch_size, the same size for all ranks"
    elif settings.train.global_batch_size is None:
        problem = "train.global_batch_size is not set"
        fix = "--set train.global_batch_size=64: the samples of a step over all ranks"
    elif options.share:
        problem, fix = "--share allows GPUs that others use", "leave out one of the two"
    elif os.environ.get(TOKEN_VARIABLE):
        problem = "this command runs inside a claim (muster gpus pick … -- …)"
        fix = "start muster train without muster gpus pick"
    else:
        return
    raise Impossible(
        f"--borrow: {problem}",
        why="a run that gives GPUs back restarts from a checkpoint on fewer ranks, with the same global batch size",
        fix=fix,
    )
