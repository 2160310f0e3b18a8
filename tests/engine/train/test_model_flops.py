"""Model FLOPs by the formula, against torch's counter, and the MFU of a step line."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from made_up_worlds import made_up_world
from torchmuster.train.data.step import MicroBatch
from torchmuster.train.reports import Reports
from torchmuster.train.step_log import StepLog
from torchmuster.worker.reporting import flops_of_batch, peak_flops

pytestmark = pytest.mark.engine

WORLD = made_up_world()
ROWS, LENGTH = 2, 128


def llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        **options,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_agrees_with_the_flops_that_torch_counts(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    batch = {"input_ids": torch.randint(1000, (ROWS, LENGTH))}
    with FlopCounterMode(display=False) as counter:
        model(**batch, labels=batch["input_ids"]).loss.backward()
    flops = flops_of_batch(model)
    assert flops is not None
    assert flops(batch) == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize(("peak", "known"), [(1e30, True), (None, False)])
def test_a_record_has_the_mfu_if_the_peak_rate_is_known(peak: float | None, known: bool) -> None:
    log = StepLog(
        WORLD, Reports(WORLD, quiet=True), flops_of_batch=lambda batch: 4e6, peak_flop_s=peak
    )
    log.add(MicroBatch(batch=None, samples=4), torch.tensor(0.1), None)
    log.end_step(torch.tensor(0.0), epoch=0, learning_rate=0.1, norm=None)
    log.finish(1)
    record = log.last_record
    assert record is not None
    assert record.flop_s is not None
    assert record.flop_s == pytest.approx(1e6 * record.samples_per_s)
    assert (record.mfu is not None) is known
    if record.mfu is not None:
        assert record.mfu == pytest.approx(record.flop_s / 1e30)


@pytest.mark.parametrize(
    ("name", "compute_in", "weights", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, torch.float32, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, torch.bfloat16, None),
        ("NVIDIA Something New", torch.bfloat16, torch.float32, None),
    ],
)
def test_the_peak_rate_is_that_of_the_gpu_in_the_dtype(
    name: str,
    compute_in: torch.dtype,
    weights: torch.dtype,
    peak: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda:0"), nn.Linear(4, 4).to(weights), compute_in) == peak
