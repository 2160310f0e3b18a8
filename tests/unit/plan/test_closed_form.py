"""Memory by a formula: what is counted of known models, and how near it comes to what was traced."""

import json
import lzma
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from plan_situations import FOLDER, LAPTOP
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.plan.hardware.cluster_file import parse_hardware
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.memory import closed_form, forecast
from torchmuster.plan.memory.model_figures import model_configuration, model_figures, weights_dtype
from torchmuster.plan.record import TraceRecord
from torchmuster.plan.request import PlanRequest
from torchmuster.plan.search.pruning import too_large_by_formula
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.units import GiB

H100 = parse_hardware("8xH100")
LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA3_8B = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA3_70B = LLAMA3_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
MIXTRAL = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
QWEN15_MOE = QWEN3_30B_A3B | {
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
GEMMA_7B = {
    "model_type": "gemma",
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 256000,
}
PYTHIA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
FALCON_7B = {
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 65024,
}


def folder_with(config: Mapping[str, object], folder: Path) -> Work:
    (folder / "config.json").write_text(json.dumps(config))
    return Work(model_name_or_path=str(folder), sequence_length=1000)


def candidate(**more: object) -> Candidate:
    usual = {"strategy": "fsdp", "precision": "bf16", "layout": ShardLayout(copies=1, shards=8)}
    return Candidate(**{**usual, **more})  # type: ignore[arg-type]


def counted(config: Mapping[str, object], folder: Path) -> int:
    return model_figures(folder_with(config, folder)).parameters


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN15_MOE, 14_315_784_192),
        (DEEPSEEK_V3, 671_026_419_200),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (GPT2, 124_439_808),
        (GEMMA_7B, 8_537_680_896),
        (PYTHIA_1B, 1_011_781_632),
        (FALCON_7B, 6_921_720_704),
    ],
)
def test_parameters_of_known_models(
    config: Mapping[str, object], published: int, tmp_path: Path
) -> None:
    assert counted(config, tmp_path) == pytest.approx(published, rel=1e-3)


def test_blocks_without_experts_among_those_with_them(tmp_path: Path) -> None:
    every = counted(QWEN3_30B_A3B, tmp_path)
    of_experts, dense = 3 * 2048 * 768 * 128 + 2048 * 128, 3 * 2048 * 6144
    fifth = counted(QWEN3_30B_A3B | {"decoder_sparse_step": 5}, tmp_path)  # blocks 4, 9 ... 44
    assert every - fifth == 39 * (of_experts - dense)
    named = counted(QWEN3_30B_A3B | {"mlp_only_layers": [0, 5]}, tmp_path)
    assert every - named == 2 * (of_experts - dense)


def test_what_a_token_goes_through(tmp_path: Path) -> None:
    assert model_figures(folder_with(QWEN3_30B_A3B, tmp_path)).inner_used == 8 * 768
    with_shared = model_figures(folder_with(DEEPSEEK_V3, tmp_path))
    assert with_shared.inner_used == (3 * 18432 + 58 * 9 * 2048) // 61
    assert with_shared.query_width == 128 * (128 + 64)


def test_experts_that_are_not_understood_are_refused(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    other = {"interleave_moe_layer_step": 2, "moe_layers": [], "moe_layer_freq": [0, 1]}
    work = folder_with({**MIXTRAL, **other}, tmp_path)
    with pytest.raises(Impossible) as caught:
        model_figures(work)
    assert "interleave_moe_layer_step, moe_layer_freq" in caught.value.why
    assert caught.value == snapshot


def test_types_of_weights(tmp_path: Path) -> None:
    def dtype(asked: str | None, **said: str) -> str:
        return weights_dtype(replace(folder_with({**LLAMA, **said}, tmp_path), torch_dtype=asked))

    assert dtype(None, torch_dtype="bfloat16") == "float32"  # as a training takes it
    assert dtype("auto", torch_dtype="bfloat16") == "bfloat16"
    assert dtype("auto", dtype="float16") == "float16"
    assert dtype("auto") == "float32"
    work = folder_with(LLAMA | {"torch_dtype": "bfloat16"}, tmp_path)
    as_in_files = closed_form.estimate_memory(
        replace(work, torch_dtype="auto"), candidate(), hardware=H100
    )
    assert as_in_files.by_category["parameters"] == 2 * 6_738_415_616 // 8


@pytest.mark.parametrize(
    ("targets", "adapters"),
    [
        (None, 6_815_744),
        (("q_proj", "v_proj"), 6_815_744),
        (
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            41_943_040,
        ),
        (("all-linear",), 41_943_040),
    ],
)
def test_only_adapters_are_trained(
    targets: tuple[str, ...] | None, adapters: int, tmp_path: Path
) -> None:
    work = replace(folder_with(LLAMA3_8B, tmp_path), lora_rank=16, lora_targets=targets)
    whole = model_figures(work).parameters
    found = closed_form.estimate_memory(work, candidate(accumulation=2), hardware=H100)
    assert found.by_category["parameters"] == 4 * (whole + adapters) // 8
    assert found.by_category["gradients"] == 4 * adapters // 8
    assert found.by_category["optimizer"] == 8 * adapters // 8
    assert found.save_bytes == 12 * adapters, "files have the frozen weights"


def test_4_bits_as_they_are_traced(tmp_path: Path) -> None:
    """A trace of bitsandbytes' layers has 5,729,803,648 bytes of parameters, with scales and tables."""
    bf16 = replace(folder_with(LLAMA3_8B, tmp_path), lora_rank=16, torch_dtype="bfloat16")
    work = replace(bf16, load_in_4bit=True)
    copy = Candidate(strategy="ddp", layout=ShardLayout(copies=8, shards=1), precision="bf16")
    found = closed_form.estimate_memory(work, copy, hardware=H100)
    assert found.by_category["parameters"] == pytest.approx(5_729_803_648, rel=1e-4)
    assert found.by_category["temporaries"] == 2 * 4096 * 14336  # one layer, dequantized
    whole = closed_form.estimate_memory(bf16, copy, hardware=H100)
    assert whole.by_category["parameters"] > 2.5 * found.by_category["parameters"]
    assert whole.by_category["temporaries"] == 0


def test_layers_that_are_trained_whole(tmp_path: Path) -> None:
    work = replace(folder_with(LLAMA3_8B, tmp_path), lora_rank=16, torch_dtype="bfloat16")
    head = replace(work, lora_modules_to_save=("lm_head",))
    few, more = (
        closed_form.estimate_memory(one, candidate(accumulation=2), hardware=H100)
        for one in (work, head)
    )
    added = more.by_category["optimizer"] - few.by_category["optimizer"]
    assert added == 2 * 2 * 128256 * 4096 // 8
    unknown = replace(work, lora_modules_to_save=("score",))
    with pytest.raises(Impossible, match="cannot be estimated"):
        closed_form.estimate_memory(unknown, candidate(), hardware=H100)


def asked_for(work: Work) -> PlanRequest:
    return PlanRequest(work=work, hardware=H100, precision=Decision(value="bf16", reason="made up"))


def test_adapters_beside_layers_of_unknown_size(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    work = replace(folder_with(LLAMA3_70B, tmp_path), lora_rank=16, lora_targets=("query",))
    with pytest.raises(Impossible) as caught:
        closed_form.estimate_memory(work, candidate(), hardware=H100)
    assert "model.lora_targets" in caught.value.fix
    assert caught.value == snapshot
    assert too_large_by_formula(candidate(), asked_for(work)) is None


def test_what_is_passed_over_by_a_formula(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    work = folder_with(LLAMA3_70B, tmp_path)
    one = candidate(recompute="full")
    adapted = replace(work, lora_rank=16)
    assert too_large_by_formula(one, asked_for(adapted)) is None
    frozen = closed_form.estimate_memory(adapted, one, hardware=H100)
    assert frozen.by_category["parameters"] / GiB == pytest.approx(32.9, abs=0.1)
    passed = too_large_by_formula(one, asked_for(work))
    least = closed_form.estimate_memory(work, one, hardware=H100).low_bytes
    assert passed is not None
    assert passed.needs_bytes == least
    assert passed.why == snapshot


def test_the_allocator_and_the_band(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    work = folder_with(LLAMA, tmp_path)
    found = closed_form.estimate_memory(work, candidate(), hardware=H100)
    tensors, terms = found.tensor_bytes, found.outside
    assert found.where is None
    assert found.reserved_bytes is None
    likely = found.total_bytes - sum(one.size_bytes for one in terms)
    least = found.low_bytes - sum(one.low_bytes for one in terms)
    most = found.high_bytes - sum(one.high_bytes for one in terms)
    assert [likely, least, most] == pytest.approx([1.2 * tensors, 0.8 * tensors, 1.56 * tensors])
    assert found.origin == snapshot
    alone = candidate(precision="fp32", layout=ShardLayout(copies=1, shards=1))
    on_cpu = closed_form.estimate_memory(work, alone, hardware=LAPTOP)
    assert on_cpu.total_bytes == on_cpu.tensor_bytes + sum(one.size_bytes for one in on_cpu.outside)
    assert on_cpu.origin == snapshot


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, micro_batch_size=2),
        lambda one: replace(one, layout=ShardLayout(copies=1, shards=4)),
        lambda one: replace(one, precision="fp32"),
        lambda one: replace(one, reshard=False),
        lambda one: replace(one, accumulation=2),
    ],
)
def test_the_formula_goes_the_right_way(
    change: Callable[[Candidate], Candidate], tmp_path: Path
) -> None:
    work = folder_with(LLAMA, tmp_path)
    less = closed_form.estimate_memory(work, candidate(), hardware=H100)
    more = closed_form.estimate_memory(work, change(candidate()), hardware=H100)
    assert more.total_bytes > less.total_bytes
    recomputed = closed_form.estimate_memory(work, candidate(recompute="full"), hardware=H100)
    assert recomputed.total_bytes < less.total_bytes


def test_copies_of_weights_for_autocast(tmp_path: Path) -> None:
    """FSDP has them as what it gathers."""
    work = replace(folder_with(LLAMA, tmp_path), sequence_length=8192)
    found = [
        closed_form.estimate_memory(one, way, hardware=H100).by_category["activations"]
        for one in (work, replace(work, torch_dtype="bfloat16"))
        for way in (candidate(), candidate(strategy="ddp", layout=ShardLayout(copies=8, shards=1)))
    ]
    assert [one - found[0] for one in found] == [0, 2 * 6_738_415_616, 0, 0]


def test_states_on_the_host(tmp_path: Path) -> None:
    work = folder_with(LLAMA, tmp_path)
    found = closed_form.estimate_memory(work, candidate(cpu_offload=True), hardware=H100)
    assert found.host_bytes == pytest.approx(16 * 6_738_415_616, rel=1e-6)
    assert {found.by_category[name] for name in ("parameters", "gradients", "optimizer")} == {0}
    assert found.save_bytes == 12 * 6_738_415_616


def test_a_model_without_a_configuration_is_refused(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as caught:
        closed_form.estimate_memory(Work(build="made_up:model"), candidate(), hardware=H100)
    assert caught.value == snapshot
    with pytest.raises(Impossible) as caught:
        closed_form.estimate_memory(
            folder_with({"hidden_size": 8}, tmp_path), candidate(), hardware=H100
        )
    assert caught.value == snapshot
    assert model_configuration(Work(model_name_or_path=str(tmp_path / "not there"))) is None


@pytest.mark.parametrize(
    "model", ["gpt2", "qwen-0.5b", "llama-1b", "mistral-7b", "llama-8b", "llama-70b", "llama-405b"]
)
def test_traced_peaks_lie_in_the_band(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs; on a CPU attention with dropout keeps its scores, and GPT-2 takes twice as much."""
    monkeypatch.chdir(FOLDER)
    alike: dict[tuple[Work, Candidate], list[TraceRecord]] = defaultdict(list)
    with lzma.open(FOLDER / f"{model}.jsonl.xz") as file:
        for line in file:
            record = msgspec.json.decode(line, type=TraceRecord)
            if record.request.kernels == "cuda":
                alike[record.request.work, record.request.candidate].append(record)
    found = {}
    for (work, one), records in alike.items():
        if len(records) > 1:
            traced = forecast.predict_memory(records, one, hardware=H100).tensor_bytes
            found[one] = traced / closed_form.estimate_memory(work, one, hardware=H100).tensor_bytes
    assert len(found) >= 5
    assert min(found.values()) > 1.0 - closed_form.BAND
    assert max(found.values()) < 1.0 + closed_form.BAND
