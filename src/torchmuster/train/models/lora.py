"""LoRA and QLoRA through peft and bitsandbytes: train small matrices next to frozen weights."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.export import ADAPTER_WEIGHTS, name_in_adapter
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.models.parameters import (
    four_bit_layers,
    parameter_counts,
    peft_config,
)
from torchmuster.train.weights import write_tensors
from torchmuster.train.world import World
from torchmuster.units import format_bytes

INSTALL = "pip install 'torchmuster[lora]'"
ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the output
_MODULES_TO_SAVE = ".modules_to_save.default"  # of peft; default is the name of a single adapter


def add_lora(model: nn.Module, *, r: int, **options: Any) -> Decision[nn.Module]:
    """Freeze a model and add matrices of rank ``r`` to some layers; only those are trained.

    ``options`` are those of ``peft.LoraConfig``, such as ``target_modules`` (names of layers, or all-linear),
    ``lora_dropout``, or ``modules_to_save`` (layers that are trained whole). ``lora_alpha`` is twice ``r`` if
    left out, and the targets are those that peft has for the type of model.
    """
    peft = _peft()
    chosen = _targets(model, options.get("target_modules"))
    modules_to_save = options.get("modules_to_save") or ()
    if hasattr(model, "prepare_inputs_for_generation"):
        options.setdefault("task_type", "CAUSAL_LM")
    options.setdefault("lora_alpha", 2 * r)
    try:
        config = peft.LoraConfig(r=r, **{**options, "target_modules": chosen.value})
    except (TypeError, ValueError) as error:
        raise Impossible(
            "peft.LoraConfig refuses these LoRA options",
            why=str(error),
            fix="change model.lora; peft's documentation lists the options of LoraConfig",
        ) from error
    layers, modules = _names_of_layers(model), _module_names(model)
    _refuse_copies_in_4_bits(model, modules_to_save)
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks transformers 5.23 for an attribute by its old name.
            warnings.simplefilter("ignore", FutureWarning)
            # A trained copy of a tied layer is no longer tied, which the reason says.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise Impossible(
            f"none of the LoRA targets is in the model: {chosen.reason.removesuffix(' (requested)')}",
            why=f"the model's layers are {', '.join(layers) or 'of no supported kind'}",
            fix="set target_modules to some of these",
        ) from error
    copied = _copied_modules(adapted)
    for name in modules_to_save:
        if not any(one == name or one.endswith(name) for one in copied):
            raise Impossible(
                f"modules_to_save has {name}, which the model does not have",
                why=f"its layers are {', '.join(sorted(modules))}",
                fix="set modules_to_save to some of these",
            )
    whole = f", {', '.join(sorted(copied))} whole" if copied else ""
    return Decision(
        value=adapted,
        reason=f"LoRA rank {r} on {chosen.reason}{whole}: {trained_share(adapted)}",
    )


def trained_share(model: nn.Module) -> str:
    """Describe how many of a model's parameters are trained: ``0.8 M of 124.4 M parameters …``."""
    total, trained = parameter_counts(model)
    share = 100 * trained / total
    return (
        f"{_count(trained)} of {_count(total)} parameters ({share:.{1 if share >= 0.1 else 3}f} %) "
        "are trained"
    )


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size / 10:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def save_adapters(
    model: nn.Module,
    state: Mapping[str, Any],
    folder: Path,
    world: World,
    *,
    beside: Path | None = None,
) -> dict[str, str]:
    """Write the trained adapter for peft: ``PeftModel.from_pretrained(model, folder)``; all ranks call it.

    ``state`` is the model's, full or sharded, and is gathered one matrix at a time. The files of the
    folder ``beside`` are copied next to it. Return, on rank 0, the hash of each tensor.
    """
    adapters = {}
    for name, tensor in state.items():
        name_in_file = name_in_adapter(name)
        if name_in_file is not None:
            adapters[name_in_file] = tensor
    files = {ADAPTER_WEIGHTS: list(adapters)}
    config = peft_config(model)
    return write_tensors(
        adapters, files, folder, world, beside=beside, finish=config.save_pretrained
    )


def four_bit_options(compute: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that load linear layers in 4 bits, as QLoRA does.

    transformers quantizes one tensor after another, so the model is never whole in memory in
    another dtype. The output layer is not quantized.
    """
    try:
        import bitsandbytes  # noqa: F401  # else transformers reports it late, with another fix
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise Impossible(
            "weights in 4 bits need bitsandbytes and transformers",
            why=str(error),
            fix="pip install 'torchmuster[qlora]'",
        ) from error
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def weights_for_4_bits(sketch: nn.Module) -> set[int]:
    """Return the ids of the parameters that :func:`four_bit_options` loads in 4 bits."""
    output = getattr(sketch, "get_output_embeddings", lambda: None)()
    return {
        id(one.weight)
        for one in sketch.modules()
        if (isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D")  # GPT-2's linear layer
        and one is not output
        and isinstance(one.weight, nn.Parameter)
        and not one.weight.requires_grad
    }


def keep_training_kernels(model: nn.Module) -> None:
    """Compute an evaluation with the kernels of training.

    On CPUs with AVX512-BF16, bitsandbytes would repack the weights at the first evaluation, in
    place, for a faster kernel with other rounding.
    """
    for layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def four_bit_memory(model: nn.Module) -> str:
    """Describe the memory of a model whose linear layers are in 4 bits."""
    layers = four_bit_layers(model)
    packed = {id(one.weight) for one in layers}
    packed_bytes = sum(one.weight.nbytes + _state_bytes(one.quant_state) for one in layers)
    weights = sum(math.prod(one.quant_state.shape) for one in layers)
    rest = [one for one in model.parameters() if id(one) not in packed and not one.requires_grad]
    dtypes = " and ".join(sorted({str(one.dtype).removeprefix("torch.") for one in rest}))
    compute = str(layers[0].compute_dtype).removeprefix("torch.") if layers else ""
    return (
        f"the frozen weights take {format_bytes(packed_bytes + sum(one.nbytes for one in rest))}: "
        f"{_count(weights)} in 4 bits (nf4, double quantization, computed in {compute}) take "
        f"{format_bytes(packed_bytes)}, the other layers are {dtypes}"
    )


def _state_bytes(state: Any) -> int:
    tensors = [one for one in vars(state).values() if isinstance(one, torch.Tensor)]
    inner = _state_bytes(state.state2) if state.nested else 0
    return inner + sum(one.nbytes for one in tensors)


def _refuse_copies_in_4_bits(model: nn.Module, modules_to_save: Sequence[str]) -> None:
    packed = {id(one) for one in four_bit_layers(model)}
    for name, module in model.named_modules():
        if id(module) in packed and name.endswith(tuple(modules_to_save)):
            raise Impossible(
                f"{name} cannot be trained whole (modules_to_save): its weights are in 4 bits",
                why="weights in 4 bits have no gradient, and peft could not load a trained copy next to them",
                fix="put it into target_modules instead, or leave out load_in_4bit",
            )


def _copied_modules(adapted: nn.Module) -> set[str]:
    """Return the names of layers that peft trains whole."""
    names = [name for name, _ in adapted.named_parameters() if _MODULES_TO_SAVE in name]
    return {name.partition(_MODULES_TO_SAVE)[0].rpartition(".")[2] for name in names}


def _module_names(model: nn.Module) -> set[str]:
    """Return the last parts of the names of layers that have parameters of their own."""
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    return {one for one in names if one and not one.isdigit()}


def _targets(model: nn.Module, wanted: str | Sequence[str] | None) -> Decision[list[str] | str]:
    if wanted in (ALL_LINEAR, [ALL_LINEAR]):
        return Decision(value=ALL_LINEAR, reason="every linear layer but the output (requested)")
    if isinstance(wanted, str):  # a regular expression, as peft takes it
        return Decision(value=wanted, reason=f"{wanted} (requested)")
    if wanted is not None:
        return Decision(value=list(wanted), reason=f"{', '.join(wanted)} (requested)")
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in KNOWN:
        names = list(KNOWN[kind])
        return Decision(
            value=names, reason=f"{', '.join(names)} (peft's targets for {kind} models)"
        )
    return Decision(
        value=ALL_LINEAR,
        reason="every linear layer (peft has no targets for this kind of model)",
    )


def _names_of_layers(model: nn.Module) -> list[str]:
    linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    return sorted({name.rpartition(".")[2] for name in linear})


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise Impossible(
            "LoRA needs peft, which is not installed", why=str(error), fix=INSTALL
        ) from error
    return peft
