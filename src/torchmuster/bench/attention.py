"""``muster bench attention``: time, memory and values of attention by sequence length."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchmuster.bench import show
from torchmuster.bench.result import Report, Row
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, line_chart

if TYPE_CHECKING:
    import torch

LENGTHS = (128, 256, 512, 1024, 2048)
QUICK_LENGTHS = (128, 512)
PLAIN = "plain"  # softmax(q k^T) v, with the whole matrix of scores
# Relative errors that rounding explains, with float64 as the reference.
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 3e-2}


def settings(device: str, *, quick: bool, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of :func:`measure`."""
    if quick:
        return {"lengths": QUICK_LENGTHS, "seconds": 0.1}
    return {"lengths": LENGTHS, "seconds": 0.4}


def measure(
    device: str,
    lengths: Sequence[int],
    heads: int = 8,
    width: int = 64,
    seconds: float = 0.4,
) -> list[Row]:
    """Run causal attention forward and backward with each implementation, batch 1.

    float32 on a CPU, bfloat16 on a GPU. ``width`` is the size of a head.
    """
    import torch

    from torchmuster.bench import timing

    place = timing.device_for(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    failed: set[str] = set()
    rows = []
    for length in sorted(lengths):
        generator = torch.Generator().manual_seed(length)
        inputs = torch.randn(3, 1, heads, length, width, generator=generator).to(place, dtype)
        head = inputs[:, :, :1].cpu().double()  # heads are independent: checking one is enough
        exact = torch.stack(forward_backward(plain_attention, head))
        calls = {}
        labels: dict[str, dict[str, str | int]] = {}
        figures = {}
        for name, attend in implementations().items():
            if name in failed:
                continue
            call = partial(forward_backward, attend, inputs)
            labels[name] = {
                "device": place.type,
                "dtype": str(dtype)[6:],
                "length": length,
                "implementation": name,
            }
            try:
                error = timing.relative_error(torch.stack(call())[:, :, :1], exact)
                figures[name] = {"error": error, "peak_bytes": timing.memory_of(call, place)[0]}
                calls[name] = call
            except RuntimeError as error:  # not for this device or dtype, or out of memory
                problem = str(error).strip().splitlines()[0]
                rows.append(Row(labels=labels[name], problem=problem))
                failed.add(name)
        for name, samples in timing.time_calls(calls, seconds).items():
            rows.append(Row(labels=labels[name], seconds=samples, figures=figures[name]))
    return rows


def plain_attention(
    query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor"
) -> "torch.Tensor":
    """Return causal attention by its formula.

    It keeps the scores of all pairs of positions, so its memory grows with the square of the length.
    The backends keep only what the backward cannot compute again.
    """
    import torch

    length, width = query.shape[-2:]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = query @ key.transpose(-2, -1) / width**0.5
    weights: torch.Tensor = scores.masked_fill(later, -torch.inf).softmax(-1)
    return weights @ value


def implementations() -> dict[str, Callable[..., "torch.Tensor"]]:
    """Return plain attention and the backends of ``scaled_dot_product_attention``, by name.

    ``math`` is the formula in torch's own code; ``flash``, ``efficient`` and ``cudnn`` never hold the
    whole matrix of scores. A backend that does not support this device or dtype raises RuntimeError
    when it is called.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def with_backend(backend: SDPBackend) -> Callable[..., "torch.Tensor"]:
        def attend(
            query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor"
        ) -> "torch.Tensor":
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, is_causal=True)

        return attend

    return {
        PLAIN: plain_attention,
        "math": with_backend(SDPBackend.MATH),
        "flash": with_backend(SDPBackend.FLASH_ATTENTION),
        "efficient": with_backend(SDPBackend.EFFICIENT_ATTENTION),
        "cudnn": with_backend(SDPBackend.CUDNN_ATTENTION),
    }


def forward_backward(
    attend: Callable[..., "torch.Tensor"], inputs: "torch.Tensor"
) -> "list[torch.Tensor]":
    """Return the output, and the gradients of its sum of squares for query, key and value."""
    import torch

    leaves = [part.detach().requires_grad_() for part in inputs]
    output = attend(*leaves)
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


def summarize(rows: Sequence[Row]) -> Report:
    """Name the fastest implementation with right values at the largest length."""
    timed = [row for row in rows if row.seconds]
    failed = [row for row in rows if row.problem]
    notes = [unusable(row) for row in failed]
    if not timed:
        return Report(
            conclusion="No implementation of attention could be measured.",
            advice="free memory of this device, and measure again.",
            tables=[],
            charts={},
            findings=notes,
        )
    longest = max(int(row.labels["length"]) for row in timed)
    at_longest = {
        row.labels["implementation"]: row for row in timed if row.labels["length"] == longest
    }
    best = min(at_longest.values(), key=lambda row: row.median_s)
    name = best.labels["implementation"]
    conclusion = f"The fastest attention at length {longest}: {name}."
    plain = at_longest.get(PLAIN)
    if plain is not None and plain is not best:
        faster = plain.median_s / best.median_s
        smaller = plain.figures["peak_bytes"] / best.figures["peak_bytes"]
        conclusion = (
            f"At length {longest}, {name} attention is {faster:.2g} times as fast as the plain "
            f"formula and its peak memory is {smaller:.2g} times smaller."
        )
    advice = "call torch.nn.functional.scaled_dot_product_attention; torch then chooses a backend."
    if name == PLAIN:
        advice = "keep the plain formula at these lengths, and measure again with longer sequences."
    table = show.table(
        "Causal attention, forward and backward",
        timed,
        show.label("length"),
        show.label("implementation"),
        show.TIME,
        show.amount("peak memory", "peak_bytes", "B"),
        show.ERROR,
    )
    chart = line_chart(
        "Causal attention: time of forward and backward",
        Axis(title="sequence length", log=True),
        Axis(title="time of one call", unit="s", log=True),
        show.curves(timed, "implementation", "length", lambda row: row.median_s),
    )
    return Report(
        conclusion=conclusion,
        advice=advice,
        tables=[table],
        charts={"attention": chart},
        findings=[*notes, *show.wrong_values("attention", timed, LARGEST_ERROR)],
    )


def unusable(row: Row) -> Finding:
    """Return the note of an implementation that failed, with the first length and the reason."""
    name, length = row.labels["implementation"], row.labels["length"]
    return Finding(
        name="attention-not-measured",
        status=Status.NOTE,
        what=f"{name} attention was not measured from length {length} on",
        why=row.problem,
    )
