"""What the benches measure on a CPU: values, memory and loss that can be worked out otherwise."""

from itertools import pairwise

import pytest
import torch

from torchmuster import benchmark_matmul
from torchmuster.bench import attention, matmul, memory, precision, timing
from torchmuster.errors import Impossible

pytestmark = pytest.mark.engine


def test_benchmark_matmul_measures_a_product() -> None:
    measured = benchmark_matmul("cpu", 64, iterations=3)
    assert (measured["device"], measured["size"], measured["iterations"]) == ("cpu", 64, 3)
    assert measured["tflops"] == pytest.approx(2 * 64**3 / measured["seconds"] / 1e12)
    assert measured["noise"] >= 0
    with pytest.raises(Impossible, match="size 0 or iterations 100"):
        benchmark_matmul("cpu", 0)


def test_products_are_timed_and_right_in_both_dtypes() -> None:
    rows = matmul.measure("cpu", sizes=[32, 128], seconds=0.02)
    cases = [(row.labels["dtype"], row.labels["size"]) for row in rows]
    assert cases == [("float32", 32), ("float32", 128), ("bfloat16", 32), ("bfloat16", 128)]
    report = matmul.summarize(rows)
    assert report.findings == []
    assert "TFLOPS" in report.conclusion


def test_all_attention_implementations_give_the_plain_outputs_and_gradients() -> None:
    rows = attention.measure("cpu", lengths=[64, 256], heads=2, width=16, seconds=0.02)
    timed = {
        (row.labels["implementation"], row.labels["length"]): row for row in rows if row.seconds
    }
    assert {"plain", "math", "flash"} <= {name for name, _ in timed}
    assert max(row.figures["error"] for row in timed.values()) < 1e-5
    plain, flash = timed["plain", 256].figures, timed["flash", 256].figures
    assert plain["peak_bytes"] > 4 * 2 * 256 * 256 > flash["peak_bytes"]  # the matrix of scores
    assert attention.summarize(rows).findings[0].name == "attention-not-measured"  # cudnn


def test_a_wrong_attention_is_a_failure() -> None:
    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return 1.01 * attention.plain_attention(query, key, value)

    inputs = torch.randn(3, 1, 2, 16, 8)
    right = torch.stack(attention.forward_backward(attention.plain_attention, inputs.double()))
    result = torch.stack(attention.forward_backward(wrong, inputs))
    error = timing.relative_error(result, right)
    assert error > attention.LARGEST_ERROR["float32"]


@pytest.mark.slow
def test_precisions_train_the_same_model_and_fp16_overflows_where_bf16_does_not() -> None:
    rows = precision.measure("cpu", steps=6, batch_size=1, blocks=1, seconds=0.05)
    stable = {row.labels["precision"]: row for row in rows if row.seconds}
    assert list(stable) == ["fp32", "bf16", "fp16"]
    for row in stable.values():
        assert row.figures["loss"] == pytest.approx(stable["fp32"].figures["loss"], rel=0.01)
        assert row.figures["loss"] < 7.3  # ln(2048) = 7.6 before the first step
    unstable = {
        (row.labels["model"], row.labels["precision"]): row for row in rows if not row.seconds
    }
    for name in (precision.LARGE_GRADIENTS, precision.LARGE_ACTIVATIONS):
        assert unstable[name, "bf16"].figures["skipped"] == 0
        assert unstable[name, "bf16"].problem == ""
    gradients = unstable[precision.LARGE_GRADIENTS, "fp16"]
    assert gradients.problem == "step 0: the scaled gradients are Inf or NaN"
    assert gradients.figures["last_scale"] < gradients.figures["first_scale"]
    assert 0 < gradients.figures["skipped"] < precision.UNSTABLE_STEPS  # the scale recovered it
    activations = unstable[precision.LARGE_ACTIVATIONS, "fp16"]
    assert "the output of layers." in activations.problem
    assert "loss" not in activations.figures
    assert len(precision.summarize(rows).findings) == 2


@pytest.mark.slow
def test_memory_by_stage_and_what_recomputing_saves() -> None:
    rows = memory.measure("cpu", batch_size=4, blocks=4, width=64, seconds=0.02)
    figures = {
        (
            row.labels["case"].partition(",")[0],
            row.labels["recompute_every"],
            row.labels["stage"],
        ): row.figures
        for row in rows
    }
    stages = [figures["fp32", 0, stage] for stage in ("forward", "backward", "optimizer step")]
    fixed = figures["fp32", 0, memory.WHOLE_STEP]["weights_gradients_states_bytes"]
    weights = fixed / 4  # weights, gradients, two moments
    assert stages[0]["before_bytes"] == pytest.approx(3 * weights, rel=0.01)
    assert stages[1]["after_bytes"] == pytest.approx(4 * weights, rel=0.01)
    assert stages[2]["after_bytes"] == pytest.approx(stages[0]["before_bytes"], rel=0.01)
    for before, after in pairwise(stages):
        assert before["after_bytes"] == after["before_bytes"]
    for stage in stages:
        assert stage["peak_bytes"] >= max(stage["before_bytes"], stage["after_bytes"])
    peaks = [figures["fp32", every, memory.WHOLE_STEP]["peak_bytes"] for every in (0, 4, 2, 1)]
    assert peaks == sorted(peaks, reverse=True)
    assert figures["bf16", 0, "forward"]["after_bytes"] < stages[0]["after_bytes"]
    assert "activation_checkpointing: 1" in memory.summarize(rows).advice


def test_every_nth_block_recomputed_gives_the_same_gradients() -> None:
    from torchmuster.bench.small_gpt import SmallGpt, texts

    batch = next(texts(2))
    gradients = []
    for every in (0, 2):
        torch.manual_seed(0)
        model = SmallGpt(width=32, blocks=2)
        model.recompute_every = every
        model(batch).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert torch.equal(*gradients)
