"""The plan request: what the settings fix, and what is left to the search."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torchmuster.config.layers import Strength
from torchmuster.config.resolve import Resolved
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.plan.job import Precision, Recompute, Work

Strategy: TypeAlias = Literal["single", "ddp", "fsdp"]
ShardingKind: TypeAlias = Literal["full_shard", "shard_grad_op", "hybrid_shard"]
_DTYPES: tuple[tuple[Precision, str], ...] = (("bf16", "bfloat16"), ("fp16", "float16"))
# Fields of a request that only an explicit setting fixes, although the setting has a default.
_SEARCHED = {
    "sharding": "distributed.fsdp_sharding_strategy",
    "cpu_offload": "distributed.fsdp_cpu_offload",
    "recompute": "train.activation_checkpointing",
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A plan request. Fields that are None are searched; all others are fixed."""

    work: Work
    hardware: Hardware
    precision: Decision[Precision]
    strategy: Strategy | None = None
    sharding: ShardingKind | None = None
    cpu_offload: bool | None = None
    recompute: Recompute | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None

    @property
    def kernels(self) -> Literal["cpu", "cuda"]:
        """Which device's operations are traced."""
        return "cpu" if self.hardware.card.kind == "cpu" else "cuda"


def request_from_settings(resolved: Resolved, hardware: Hardware, *, folder: str) -> PlanRequest:
    """Build a plan request from settings: what a file, a variable or a flag sets is fixed.

    So is a default that a settings file writes out, as the config.yaml of a run folder does.
    """
    train = resolved.settings.train
    fixed: dict[str, Any] = {}
    for name, path in _SEARCHED.items():
        if resolved.sources[path].strength is not Strength.DEFAULT:
            fixed[name] = resolved.values()[path]
    return PlanRequest(
        work=work_from_settings(resolved, folder=folder),
        hardware=hardware,
        precision=_precision(train.precision, hardware.card),
        strategy=_strategy(resolved, hardware),
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        **fixed,
    )


def _strategy(resolved: Resolved, hardware: Hardware) -> Strategy | None:
    distributed = resolved.settings.distributed
    strategy = distributed.strategy
    if not distributed.enabled or (strategy == "ddp" and hardware.cards == 1):
        return "single"
    return None if strategy == "auto" else strategy


def work_from_settings(resolved: Resolved, *, folder: str) -> Work:
    """Return what is trained, from the settings."""
    model, data = resolved.settings.model, resolved.settings.data
    train = resolved.settings.train
    if model.model_name_or_path is None and model.build is None:
        raise Impossible(
            "no model to plan for",
            fix="--model FOLDER_OR_NAME, --set model.build=module:function, or --config FILE",
        )
    has_length = resolved.sources["data.sequence_length"].strength is not Strength.DEFAULT
    is_text = model.build is None or data.files or data.hugging_face or has_length
    if data.dataset is None and not is_text:
        raise Impossible(
            "the shape of a batch for this model is unknown",
            why="a custom model does not describe its inputs",
            fix="--set data.dataset=module:function (the shape of its first sample is used), or "
            "--sequence-length N for rows of tokens",
        )
    if model.load_in_4bit and (model.lora is None or model.model_name_or_path is None):
        raise Impossible(
            "model.load_in_4bit needs model.lora and model.model_name_or_path",
            why="4-bit weights are frozen, and loaded from the files of a Hugging Face model",
            fix="--set 'model.lora={r: 16}' --model FOLDER_OR_NAME, or leave out model.load_in_4bit",
        )
    return Work(
        build=model.build,
        model_name_or_path=model.model_name_or_path,
        torch_dtype=model.torch_dtype,
        loss=model.loss,
        lora=model.lora,
        load_in_4bit=model.load_in_4bit,
        dataset=data.dataset,
        images=data.images,
        sequence_length=None if data.dataset or data.images else data.sequence_length,
        packed=data.pack is not False and bool(data.files or data.hugging_face),
        optimizer=train.optimizer,
        optimizer_options=train.optimizer_options,
        clip_norm=train.clip_norm,
        folder=folder,
    )


def _precision(wanted: Literal["auto"] | Precision, card: Gpu) -> Decision[Precision]:
    """Choose as ``muster train`` does: bf16 if the GPU has it, then fp16; fp32 on CPUs.

    A GPU without known rates is assumed to have bf16.
    """
    if wanted == "bf16" and card.flops and "bfloat16" not in card.flops:
        raise Impossible(
            f"precision bf16 was requested, but {card.name} does not support bf16",
            fix="use precision auto or fp16, or another GPU",
        )
    if wanted != "auto":
        return Decision(value=wanted, reason=f"{wanted}: requested")
    if card.kind == "cpu":
        return Decision(value="fp32", reason="fp32: CPUs seldom gain from bf16")
    if not card.flops:
        return Decision(
            value="bf16", reason=f"bf16: assumed, the dtypes of {card.name} are unknown"
        )
    for precision, dtype in _DTYPES:
        if dtype in card.flops:
            return Decision(value=precision, reason=f"{precision}: {card.name} supports it")
    return Decision(value="fp32", reason=f"fp32: {card.name} has no faster dtype")
