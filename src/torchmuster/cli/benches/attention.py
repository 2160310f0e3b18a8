"""``muster bench attention``: compare attention implementations by sequence length."""

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

from torchmuster.cli import output, parsers
from torchmuster.cli.bench import add_common_flags, device_of, finish, now, size
from torchmuster.errors import ExitCode

if TYPE_CHECKING:
    from torchmuster.bench.attention import AttentionRequest

# Batch, heads and head size: large enough to load a device, small enough for plain attention.
_ON_CPU, _ON_GPU = (1, 8, 64), (4, 16, 64)
_ROUNDS_QUICK = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster bench attention``."""
    parser.description = (
        f"{parser.description}\nComputes plain attention, each backend of "
        "scaled_dot_product_attention and "
        "flex_attention;\nshows time and memory by length, compares the outputs, and recommends "
        "one."
    )
    parsers.show_examples(
        parser,
        [
            "muster bench attention                          causal, 128 tokens and more",
            "muster bench attention --lengths 4096 16384     these lengths, without a time limit",
            "muster bench attention --heads 32 --head-size 128 --type bfloat16",
        ],
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=size,
        metavar="N",
        help="sequence lengths in tokens (default: 128 … 8192)",
    )
    parser.add_argument(
        "--batch", type=size, metavar="N", help="sequences per batch (default: 1 on a CPU, else 4)"
    )
    parser.add_argument(
        "--heads", type=size, metavar="N", help="number of heads (default: 8 on a CPU, else 16)"
    )
    parser.add_argument(
        "--head-size", type=size, metavar="N", help="dimension of each head (default: 64)"
    )
    parser.add_argument(
        "--type",
        choices=("float32", "bfloat16", "float16"),
        help="dtype (default: float32 on a CPU, else bfloat16 if the GPU supports it)",
    )
    parser.add_argument(
        "--not-causal",
        action="store_true",
        help="no causal mask: every token attends to all others",
    )
    add_common_flags(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, save and print the results."""
    from torchmuster.bench import attention, environment

    begun = time.monotonic()
    where = device_of(options)
    request = _attention_request(options, on_cpu=where.value == "cpu")
    seen = environment.environment_here(where.value)
    answer = attention.measure_attention(request, device=where.value, say=output.say)
    report = attention.attention_report(
        request,
        answer,
        where=where,
        environment=seen.ended(),
        settings=dataclasses.asdict(request),
        date=now(),
        took_s=time.monotonic() - begun,
    )
    return finish(report, options)


def _attention_request(options: argparse.Namespace, *, on_cpu: bool) -> "AttentionRequest":
    from torchmuster.bench import attention

    batch, heads, head_size = _ON_CPU if on_cpu else _ON_GPU
    lengths = attention.LENGTHS_QUICK if options.quick else attention.LENGTHS
    # Compiling flex_attention takes longer than everything else.
    kinds = tuple(one for one in attention.KINDS if not (options.quick and one == "flex"))
    request = attention.AttentionRequest(
        device="cpu" if on_cpu else "auto",
        number_type=options.type or "auto",
        lengths=tuple(options.lengths or lengths),
        batch=options.batch or batch,
        heads=options.heads or heads,
        head_size=options.head_size or head_size,
        causal=not options.not_causal,
        kinds=kinds,
    )
    if options.lengths:
        request = dataclasses.replace(request, longest_s=None)
    return dataclasses.replace(request, rounds=_ROUNDS_QUICK) if options.quick else request
