"""Measures all available attention implementations, interleaved, and compares their outputs."""

import contextlib
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from torchmuster.bench.attention import AttentionAnswer, AttentionRequest, MeasuredAttention
from torchmuster.bench.probes.clock import (
    device_name,
    device_of,
    interleaved,
    number_types,
    quickest_s,
)
from torchmuster.plan.proof.fresh_ranks import leave_answer
from torchmuster.plan.torch_private import single_allocations
from torchmuster.train.models.blocks import can_compile
from torchmuster.train.out_of_memory import is_out_of_memory

Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class AttentionKind:
    """One attention implementation, built for a sequence length."""

    def __init__(self, make: Callable[[int], Attention], *, forward_only: str = "") -> None:
        self.make = make
        self.forward_only = forward_only


def available_attention(
    names: tuple[str, ...], inputs: Inputs, *, causal: bool
) -> tuple[dict[str, AttentionKind], dict[str, str]]:
    """Try every implementation on a short sequence.

    Return those that work, and the others' errors.
    """
    kinds: dict[str, AttentionKind] = {}
    missing: dict[str, str] = {}
    device = inputs[0].device
    for name in names:
        if name == "flex":
            possible = can_compile(device)
            if not possible.value:
                missing[name] = f"{possible.reason}; without compilation it is no faster than plain"
                continue
        kind = _attention_kind(name, causal, device)
        trouble = _trouble(kind, inputs)
        if trouble:
            missing[name] = trouble
        else:
            kinds[name] = kind
    return kinds, missing


def _attention_kind(name: str, causal: bool, device: torch.device) -> AttentionKind:
    if name == "plain":
        return AttentionKind(lambda length: partial(plain_attention, _mask(length, causal, device)))
    if name == "sdpa":
        return AttentionKind(lambda length: partial(_sdpa, None, causal))
    if name == "flex":
        only = "torch has no backward for it on CPUs" if device.type == "cpu" else ""
        compiled = _compiled_flex()
        return AttentionKind(
            lambda length: _flex(compiled, length, causal, device), forward_only=only
        )
    return AttentionKind(lambda length: partial(_sdpa, _BACKENDS[name], causal))


def _trouble(kind: AttentionKind, inputs: Inputs) -> str:
    """Return why an implementation does not work here; empty if it does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            output = kind.make(inputs[0].shape[-2])(*inputs)
            if not kind.forward_only:
                torch.autograd.grad(output.sum(), inputs)
        except (RuntimeError, NotImplementedError) as error:
            reasons = [*(str(one.message) for one in said), str(error)]
            first = next((one for one in reasons if one), type(error).__name__)
            return first.splitlines()[0].partition(". ")[0]
    return ""


def _mask(length: int, causal: bool, device: torch.device) -> torch.Tensor | None:
    """Return the mask of keys after each query."""
    if not causal:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def plain_attention(
    later: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Compute attention by its definition; ``later`` masks the keys after each query."""
    scores: torch.Tensor = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
    if later is not None:
        scores = scores.masked_fill(later, float("-inf"))
    attended: torch.Tensor = scores.softmax(-1) @ values
    return attended


def _sdpa(
    backend: SDPBackend | None,
    causal: bool,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(queries, keys, values, is_causal=causal)


def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _is_not_later(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query >= key


def _flex(compiled: Any, length: int, causal: bool, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None
    if causal:
        mask = create_block_mask(_is_not_later, None, None, length, length, device=device)

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if device.type == "cpu":  # it rejects inputs that require gradients
            queries, keys, values = queries.detach(), keys.detach(), values.detach()
        output: torch.Tensor = compiled(queries, keys, values, block_mask=mask)
        return output

    return attend


# Allowed rounding error relative to the norm: probabilities and outputs are rounded to the dtype.
_MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_ROWS_CHECKED = 64  # at the beginning and at the end of a sequence


def measure_attention_kinds(request: AttentionRequest) -> AttentionAnswer:
    """Measure every implementation at every length."""
    device = device_of(request.device)
    dtype = _attention_dtype(request, device)
    shortest = _inputs(replace(request, batch=1), min(request.lengths), device, dtype)
    kinds, missing = available_attention(request.kinds, shortest, causal=request.causal)
    last_s: dict[str, float] = {}  # duration of a call at the previous length
    found: list[MeasuredAttention] = []
    for length in sorted(set(request.lengths)):
        found += _at_length(request, length, kinds, device, dtype, last_s)
    return AttentionAnswer(
        device=str(device),
        device_name=device_name(device),
        number_type=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        missing=missing,
        measured=tuple(found),
        compile_s=last_s.get("compiling"),
    )


def _attention_dtype(request: AttentionRequest, device: torch.device) -> torch.dtype:
    name: str = request.number_type
    if name == "auto":
        types, _ = number_types(device)
        wanted = ("float32",) if device.type == "cpu" else ("bfloat16", "float16", "float32")
        name = next(one for one in wanted if one in types)
    return {one: one_type for one_type in _MOST_ERROR for one in [str(one_type)[6:]]}[name]


def _inputs(
    request: AttentionRequest, length: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    maker = torch.Generator().manual_seed(length)
    size = (request.batch, request.heads, length, request.head_size)
    made = (torch.randn(size, generator=maker).to(device, dtype) for _ in range(3))
    queries, keys, values = (one.requires_grad_() for one in made)
    return queries, keys, values


def _at_length(
    request: AttentionRequest,
    length: int,
    kinds: dict[str, AttentionKind],
    device: torch.device,
    dtype: torch.dtype,
    last_s: dict[str, float],
) -> Iterator[MeasuredAttention]:
    inputs = _inputs(request, length, device, dtype)
    turns: dict[str, Callable[[], object]] = {}
    found: dict[str, MeasuredAttention] = {}
    for name, kind in kinds.items():
        expected_s = 4 * last_s.get(
            name, 0.0
        )  # lengths double, and the work grows with their square
        if request.longest_s is not None and expected_s > request.longest_s:
            reason = f"a forward and a backward pass would take about {expected_s:.2g} s"
            found[name] = MeasuredAttention(kind=name, length=length, left_out=reason)
            continue
        begun_s = time.perf_counter()
        attend = kind.make(length)
        forward, training = partial(_forward, attend, inputs), partial(_training, attend, inputs)
        try:
            one = _checked(name, length, attend, inputs, request.causal, kind)
            if name == "flex":
                so_far_s = last_s.get("compiling", 0.0)
                last_s["compiling"] = so_far_s + time.perf_counter() - begun_s
            one = replace(one, forward_bytes=_peak_bytes(forward, device))
            turns[f"{name} forward"] = forward
            if not kind.forward_only:
                one = replace(one, training_bytes=_peak_bytes(training, device))
                turns[f"{name} training"] = training
            last_s[name] = quickest_s(forward if kind.forward_only else training, device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            turns = {key: turn for key, turn in turns.items() if not key.startswith(f"{name} ")}
            one = MeasuredAttention(kind=name, length=length, left_out="out of memory")
            _give_back(device)
        found[name] = one
    taken = interleaved(
        turns, device=device, rounds=request.rounds, least_sample_s=request.least_sample_s
    )
    for name, one in found.items():
        yield replace(
            one,
            forward_s=taken.get(f"{name} forward", ()),
            training_s=taken.get(f"{name} training", ()),
        )


def _forward(attend: Attention, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return attend(*inputs)


def _training(attend: Attention, inputs: Inputs) -> Sequence[torch.Tensor]:
    output = attend(*inputs)
    return torch.autograd.grad(output, inputs, torch.ones_like(output))


def _checked(
    name: str, length: int, attend: Attention, inputs: Inputs, causal: bool, kind: AttentionKind
) -> MeasuredAttention:
    """Compare the output with float64: the first and last places of one head; gradients with short sequences."""
    rows = sorted(
        {*range(min(_ROWS_CHECKED, length)), *range(max(0, length - _ROWS_CHECKED), length)}
    )
    queries, keys, values = (one[0, 0].detach().cpu().double() for one in inputs)
    queries, keys, values = (one.requires_grad_() for one in (queries, keys, values))
    later = torch.arange(length) > torch.tensor(rows)[:, None] if causal else None
    expected = plain_attention(later, queries[rows], keys, values)
    output = attend(*inputs)
    error = _difference(output[0, 0][rows], expected)
    if len(rows) == length and not kind.forward_only:
        wanted = torch.autograd.grad(expected.sum(), (queries, keys, values))
        given = torch.autograd.grad(output.sum(), inputs)
        pairs = zip(given, wanted, strict=True)
        error = max(error, *(_difference(one[0, 0], exact) for one, exact in pairs))
    most = _MOST_ERROR[inputs[0].dtype]
    return MeasuredAttention(
        kind=name, length=length, error=error, right=error <= most, forward_only=kind.forward_only
    )


def _difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    exact = expected.detach()
    return float((given.detach().cpu().double() - exact).norm() / exact.norm())


def _peak_bytes(turn: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call above the memory before it."""
    if device.type != "cpu":
        before = int(torch.accelerator.memory_allocated(device))
        torch.accelerator.reset_peak_memory_stats(device)
        turn()
        return int(torch.accelerator.max_memory_allocated(device)) - before
    # The profiler also sees allocations of compiled code and kernels.
    # acc_events: torch 2.12 warns about its default, which matters only if a profiler starts twice.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        result = turn()
    peak = max(accumulate(single_allocations(seen)), default=0)
    del result
    return max(peak, 0)


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def main(request: str, answers: str) -> None:
    """Read the request, measure, and write the answer."""
    asked = msgspec.json.decode(Path(request).read_bytes(), type=AttentionRequest)
    leave_answer(answers, 0, msgspec.json.encode(measure_attention_kinds(asked)).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
