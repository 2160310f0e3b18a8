"""Answers of other tools for one case at a time: JSON lines in, JSON lines out; runs in the peers' environment.

What a tool cannot do is ``null``, with the reason on standard error.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from peak_memory import formulas
from peak_memory.cases import Case
from peak_memory.families import SEQUENCE
from peak_memory.formulas import Shape
from torchmuster.plan.probes.build_step import build_step
from torchmuster.plan.probes.fake_process_group import fake_process_group, masks_of_real_runs
from torchmuster.train.torch_private import TorchDispatchMode

_PATCHES = 65  # of a picture, with the one that stands for the whole


def model_of(case: Case, folder: Path) -> nn.Module:
    """Build the case's model without memory."""
    from peak_memory import models

    with torch.device("meta"):
        if case.work(folder).build is not None:
            return getattr(models, case.family)()  # type: ignore[no-any-return]
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(case.work(folder).model_name_or_path)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def shape_of(case: Case, model: nn.Module) -> Shape | None:
    """Return a transformer's sizes; None for what is none."""
    if case.family == "residual":
        return None
    if case.family == "little_gpt":
        sizes = {"hidden": 384, "layers": 6, "heads": 6, "feed_forward": 1536, "vocabulary": 256}
        return _shape(model, sizes, tied=False, gated=False, sequence=SEQUENCE)
    config: Any = model.config
    words = case.family != "vit"
    sizes = {
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "feed_forward": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "vocabulary": config.vocab_size if words else config.num_labels,
    }
    return _shape(
        model,
        sizes,
        key_value_heads=getattr(config, "num_key_value_heads", None),
        tied=bool(getattr(config, "tie_word_embeddings", False)) and words,
        gated=case.family in ("llama", "qwen2", "mistral"),
        sequence=SEQUENCE if words else _PATCHES,
    )


def _shape(model: nn.Module, sizes: dict[str, int], **more: Any) -> Shape:
    heads = more.pop("key_value_heads", None) or sizes["heads"]
    parameters, largest = counts(model)
    return Shape(
        parameters=parameters, largest_layer=largest, key_value_heads=heads, **sizes, **more
    )


def counts(model: nn.Module) -> tuple[int, int]:
    """Return how many parameters a model and its largest single module have."""
    own = (sum(one.numel() for one in m.parameters(recurse=False)) for m in model.modules())
    return sum(one.numel() for one in model.parameters()), max(own)


def accelerate(case: Case, model: nn.Module) -> float:
    """``accelerate estimate-memory``: training with Adam, before anything is computed; shards are not known to it."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model)
    kind = "float32" if case.number_type == "fp32" else "float16"
    return float(max(estimate_training_usage(total, kind).values()))


def llm_analysis(case: Case, shape: Shape | None) -> float | None:
    """``llm-analysis``: it knows 16 bits only."""
    if shape is None or case.number_type == "fp32":
        return None
    from llm_analysis import analysis, config

    recompute = analysis.ActivationRecomputation
    kinds = {"none": recompute.NONE, "selective": recompute.ATTN_COMPUTE}
    sharded = case.strategy == "fsdp"
    found = analysis.LLMAnalysis(
        config.ModelConfig(
            name=case.family,
            num_layers=shape.layers,
            n_head=shape.heads,
            hidden_dim=shape.hidden,
            vocab_size=shape.vocabulary,
            max_seq_len=shape.sequence,
            num_key_value_heads=shape.key_value_heads,
            ffn_embed_dim=shape.feed_forward,
            mlp_gated_linear_units=shape.gated,
        ),
        config.get_gpu_config_by_name("a100-sxm-80gb"),
        config.get_dtype_config_by_name("w16a16e16"),
        config.ParallelismConfig(
            dp_size=case.shards if sharded else case.copies,
            rdp_size=case.copies if sharded else 1,
        ),
    ).training(
        batch_size_per_gpu=case.micro_batch_size,
        gradient_accumulation_steps=case.accumulation,
        seq_len=shape.sequence,
        activation_recomputation=kinds.get(str(case.recompute), recompute.FULL),
        ds_zero=analysis.DSZeRO.STAGE_3 if sharded else analysis.DSZeRO.NONE,
    )
    return float(found["estimated_peak_memory_per_gpu"])


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a loop asks tensors without memory: nothing overflowed, ranks agree; an optimizer is at step 1."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = 0
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "_answer", 1))
        optimizer.register_step_post_hook(lambda *_: setattr(self, "_answer", 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._answer
        return func(*args, **(kwargs or {}))


def _unheard(bucket: torch.Tensor, ranks: int) -> None:
    """Take no note of a reduction."""


def mem_tracker(case: Case, folder: Path) -> float:
    """Torch's own tracker, inside the world that our trace imagines: by itself it has no ranks to run in."""
    from torch.distributed._tools.mem_tracker import MemTracker

    candidate = case.candidate()
    ranks = candidate.layout.ranks
    with fake_process_group(ranks, ranks_per_machine=ranks, reduced=_unheard) as world:
        built = build_step(case.work(folder), candidate, world)
        tracker = MemTracker()
        tracker.track_external(built.model, built.optimizer)
        with masks_of_real_runs(packed=False), tracker, _Values(built.optimizer):
            for number in range(2):
                if number:
                    tracker.reset_mod_stats()
                built.train(number)
    peaks = tracker.get_tracker_snapshot("peak")
    return float(sum(of_device["Total"] for of_device in peaks.values()))


def answers(case: Case, folder: Path) -> dict[str, float | None]:
    """Return what every tool says."""
    model = model_of(case, folder)
    shape = shape_of(case, model)
    plain = msgspec.to_builtins(case)
    tools: dict[str, Callable[[], float | None]] = {
        "torch MemTracker, in our fake process group": lambda: mem_tracker(case, folder),
        "llm-analysis (16 bits only)": lambda: llm_analysis(case, shape),
        "Megatron-LM's formula": lambda: shape and formulas.megatron(plain, shape),
        "EleutherAI's calc_transformer_mem": lambda: shape and formulas.eleuther(plain, shape),
        "DeepSpeed's estimators (states only)": lambda: formulas.deepspeed(plain, *counts(model)),
        "accelerate estimate-memory (states only)": lambda: accelerate(case, model),
    }
    found: dict[str, float | None] = {}
    for name, tool in tools.items():
        try:
            found[name] = tool()
        except Exception as error:
            print(f"{case.name}: {name}: {error!r}", file=sys.stderr)
            found[name] = None
    return found


def main() -> None:
    """Answer case after case."""
    folder = Path(sys.argv[1])
    output = sys.stdout
    sys.stdout = sys.stderr  # what tools print is no answer
    for line in sys.stdin:
        case = msgspec.convert(json.loads(line), Case)
        told = {"name": case.name, "predicted": answers(case, folder)}
        print(json.dumps(told), file=output, flush=True)


if __name__ == "__main__":
    main()
