"""4-bit layers without memory have the bytes of bitsandbytes' own layers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torchmuster.plan.estimate import ITEM_BYTES
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes import four_bit
from torchmuster.plan.probes.fake_process_group import fake_process_group, forget_values
from torchmuster.plan.probes.step_tracer import StepTracer
from torchmuster.plan.probes.trace import trace
from torchmuster.plan.record import TraceRequest
from torchmuster.train.strategies.sharding import ShardLayout

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quiet_transformers"), pytest.mark.slow]
pytest.importorskip("bitsandbytes")

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
ALONE = Candidate(
    strategy="single", layout=ShardLayout(copies=1, shards=1), precision="bf16", micro_batch_size=2
)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return Work(
        model_name_or_path=str(tmp_path), sequence_length=32, lora={"r": 4}, torch_dtype="bfloat16"
    )


def layers(device: str) -> nn.Sequential:
    sizes = ((128, 320), (320, 128), (128, 64))
    made = [nn.Linear(*size, bias=False, device=device, dtype=torch.bfloat16) for size in sizes]
    return nn.Sequential(*made)


def states_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *four_bit.quantization_tensors(model)]
    return sum(one.numel() * one.itemsize for one in tensors)


def test_a_layer_without_memory_has_the_bytes_of_a_real_one() -> None:
    real = layers("cpu")
    four_bit.replace_linear_layers(real, torch.bfloat16)
    weight = real[0].weight
    assert type(weight).__name__ == "Params4bit"
    assert weight.dtype is torch.uint8
    traced = layers("meta")
    four_bit.replace_linear_layers(traced, torch.bfloat16)
    with fake_process_group(1, ranks_per_machine=1, reduced=lambda bucket: None) as world:
        forget_values(traced, world)
        four_bit.quantize_without_memory(traced)
        assert states_bytes(traced) == states_bytes(real)
        first = next(traced.parameters())
        assert four_bit.whole_shape(first) == (320, 128)
    elements = sum(i * o for i, o in ((128, 320), (320, 128), (128, 64)))
    tables = len(real) * (16 + 256 + 1) * 4  # of nf4, of the scales, and their mean
    assert states_bytes(real) - tables == pytest.approx(elements * ITEM_BYTES["nf4"], rel=0.002)


@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_in_single_operations_is_that_of_bitsandbytes(rows: int) -> None:
    torch.manual_seed(0)
    real = layers("cpu")
    four_bit.replace_linear_layers(real, torch.bfloat16)
    given = torch.randn(rows, 128, dtype=torch.bfloat16, requires_grad=True)
    expected = real(given)
    (gradient,) = torch.autograd.grad(expected.sum(), given)
    seen = StepTracer(on_host=True)
    with seen.followed():
        found = real(given)
        (followed,) = torch.autograd.grad(found.sum(), given)
    assert torch.equal(found, expected)
    assert torch.equal(followed, gradient)
    # The weight of one layer at a time, in the dtype of the product.
    whole = 128 * 320 * 2
    assert max(peak.peak_bytes for peak in seen.peaks.values()) > whole


def test_4_bits_take_less_and_are_counted_as_the_same_parameters(work: Work) -> None:
    plain = trace(TraceRequest(work=work, candidate=ALONE, kernels="cuda"))
    quantized = trace(
        TraceRequest(work=replace(work, load_in_4bit=True), candidate=ALONE, kernels="cuda")
    )
    assert quantized.parameter_count == plain.parameter_count
    assert quantized.trained_count == plain.trained_count
    before, after = (record.peaks[0].by_category for record in (plain, quantized))
    assert after["parameters"] < before["parameters"]
    assert after["optimizer"] == before["optimizer"]
    flops = [sum(record.costs["last"].flops.values()) for record in (plain, quantized)]
    assert flops[0] == flops[1]


def test_a_few_layers_tell_the_memory_of_all(work: Work) -> None:
    """Depth is computed from copies of a few layers, which bitsandbytes' own could not be."""
    four = replace(work, load_in_4bit=True)
    few, more, most = (
        trace(TraceRequest(work=four, candidate=ALONE, blocks=blocks, kernels="cuda"))
        for blocks in (2, 3, 4)
    )
    assert most.blocks == 4
    added = [one.peaks[0].by_category["parameters"] for one in (few, more, most)]
    assert added[2] - added[1] == added[1] - added[0]
    assert few.parameter_count == most.parameter_count
