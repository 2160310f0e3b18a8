"""What a plan is asked for: what is fixed by settings, and what is left to the search."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchmuster.config.fields import leaves
from torchmuster.config.layers import Strength
from torchmuster.config.resolve import Resolved
from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Recompute, Work

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
ShardingKind: TypeAlias = Literal["full_shard", "shard_grad_op", "hybrid_shard"]
_FULL_RATE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The question. What is None is searched; everything else is taken as it is."""

    work: Work
    hardware: Hardware
    precision: Decision[Precision]
    strategy: Literal["single", "ddp", "fsdp"] | None = None
    sharding: ShardingKind | None = None
    shard_size: int | None = None
    cpu_offload: bool | None = None
    recompute: Recompute | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    tokens: int | None = None  # how much is to be trained on, for hours and cost

    @property
    def kernels(self) -> Literal["cpu", "cuda"]:
        """Whose operations are traced."""
        return "cpu" if self.hardware.card.kind == "cpu" else "cuda"


def request_from_settings(
    resolved: Resolved, hardware: Hardware, *, folder: str, tokens: int | None = None
) -> PlanRequest:
    """Translate settings: what they fix is fixed, the rest is searched.

    A file may write defaults out, as that of a run's folder does: they fix nothing. A flag or a variable does.
    """
    settings = resolved.settings
    distributed, train = settings.distributed, settings.train
    if train.micro_batch_sizes is not None:
        raise Impossible(
            "a plan cannot follow train.micro_batch_sizes",
            why=f"it gives each rank a size of its own "
            f"({resolved.sources['train.micro_batch_sizes'].where}), and a plan is for ranks that are alike",
            fix="--set train.micro_batch_sizes=null, and train.micro_batch_size for one size on all ranks",
        )
    return PlanRequest(
        work=work_from_settings(resolved, folder=folder),
        hardware=hardware,
        precision=_precision(train.precision, hardware.card),
        strategy=_strategy(resolved, hardware),
        sharding=distributed.fsdp_sharding_strategy
        if _is_fixed(resolved, "distributed.fsdp_sharding_strategy")
        else None,
        shard_size=distributed.fsdp_shard_size,
        cpu_offload=distributed.fsdp_cpu_offload
        if _is_fixed(resolved, "distributed.fsdp_cpu_offload")
        else None,
        recompute=train.activation_checkpointing
        if _is_fixed(resolved, "train.activation_checkpointing")
        else None,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        tokens=tokens,
    )


def _strategy(resolved: Resolved, hardware: Hardware) -> Literal["single", "ddp", "fsdp"] | None:
    distributed = resolved.settings.distributed
    if not distributed.enabled or (distributed.strategy == "ddp" and hardware.cards == 1):
        return "single"
    return None if distributed.strategy == "auto" else distributed.strategy


def work_from_settings(resolved: Resolved, *, folder: str) -> Work:
    """Return what is trained, as settings name it."""
    model, data = resolved.settings.model, resolved.settings.data
    if model.model_name_or_path is None and model.build is None:
        raise Impossible(
            "there is no model to plan for",
            fix="--model FOLDER_OR_NAME, --build module:function, or --config with one of them",
        )
    has_length = resolved.sources["data.sequence_length"].strength is not Strength.DEFAULT
    is_text = model.build is None or data.files or data.hugging_face or has_length
    if data.dataset is None and not is_text:
        raise Impossible(
            "what a batch of this model looks like is not known",
            why="a model of your own says nothing about what goes into it",
            fix="--dataset module:function (its first sample shows it), or --sequence-length N for "
            "rows of tokens",
        )
    return work_from_values(resolved.settings, folder=folder)


def work_from_values(settings: Settings, *, folder: str) -> Work:
    """Return what is trained by settings that name a model and data."""
    model, data, train = settings.model, settings.data, settings.train
    return Work(
        build=model.build,
        model_name_or_path=model.model_name_or_path,
        torch_dtype=model.torch_dtype,
        attention=model.attention,
        loss=model.loss,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        lora_targets=model.lora_targets,
        dataset=data.dataset,
        sequence_length=None if data.dataset else data.sequence_length,
        packed=data.pack and bool(data.files or data.hugging_face),
        optimizer=train.optimizer,
        clip_norm=train.clip_norm,
        folder=folder,
    )


def _is_fixed(resolved: Resolved, path: str) -> bool:
    strength = resolved.sources[path].strength
    if strength is Strength.FILE:
        return resolved.values()[path] != leaves()[path].default
    return strength is not Strength.DEFAULT


def _precision(asked: Literal["auto", "fp32", "bf16", "fp16"], card: Gpu) -> Decision[Precision]:
    """Choose as a training does: bf16 where the card has it, then fp16; fp32 on CPUs."""
    if card.kind == "cpu":
        if asked == "auto":
            return Decision(value="fp32", reason="fp32: CPUs seldom gain from bf16")
        return Decision(value=asked, reason=f"{asked}: asked for")
    if asked == "auto":
        chosen, why = _automatic(card)
        return Decision(value=chosen, reason=f"{chosen}: {why}{_of_speed(chosen, card)}")
    if asked == "bf16" and card.number_types is not None and "bfloat16" not in card.number_types:
        raise Impossible(
            f"precision bf16 was asked for, but {card.name} has no bf16",
            fix="precision auto or fp16, or another card",
        )
    return Decision(value=asked, reason=f"{asked}: asked for{_of_speed(asked, card)}")


def _automatic(card: Gpu) -> tuple[Precision, str]:
    types = card.number_types or tuple(card.flops)
    if not types:
        return "bf16", f"assumed, since nothing says which types {card.name} has"
    if "bfloat16" in types:
        return "bf16", f"{card.name} has it"
    if "float16" in types:
        return "fp16", f"{card.name} has it, and no bf16"
    return "fp32", f"{card.name} has no faster type"


def _of_speed(precision: Precision, card: Gpu) -> str:
    """Say so where nobody knows how fast a card computes in this precision."""
    if card.flops.get(_FULL_RATE[precision]):
        return ""
    if card.flops.get("float32"):
        return "; its rate is not known, and that of float32 is computed with"
    return "; its rate is not known, so no speed is forecast"
