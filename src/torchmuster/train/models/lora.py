"""LoRA and QLoRA through peft and bitsandbytes: train small matrices next to frozen weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.export import ADAPTER_WEIGHTS, name_in_adapter
from torchmuster.errors import Impossible
from torchmuster.train.models.parameters import four_bit_layers, peft_config
from torchmuster.train.weights import write_tensors
from torchmuster.train.world import World

INSTALL = "pip install 'torchmuster[lora]'"
ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the output


def add_lora(model: nn.Module, *, r: int, **options: Any) -> nn.Module:
    """Freeze a model and add matrices of rank ``r`` to some layers; only those are trained.

    ``options`` are those of ``peft.LoraConfig``, such as ``target_modules`` (names of layers, or all-linear),
    ``lora_dropout``, or ``modules_to_save`` (layers that are trained whole). ``lora_alpha`` is twice ``r`` if
    left out, and the targets are those that peft has for the type of model, or all linear layers.
    """
    try:
        import peft
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN
    except ImportError as error:
        raise Impossible(
            "LoRA needs peft, which is not installed", why=str(error), fix=INSTALL
        ) from error
    options = {"lora_alpha": 2 * r, **options}
    if hasattr(model, "prepare_inputs_for_generation"):
        options.setdefault("task_type", "CAUSAL_LM")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in KNOWN:
        options.setdefault("target_modules", ALL_LINEAR)
    if options.get("target_modules") == [ALL_LINEAR]:
        options["target_modules"] = ALL_LINEAR
    paths = [path for path, _ in model.named_modules()]
    try:
        for name in options.get("modules_to_save") or ():  # peft ignores one that is not there
            if not any(path.endswith(name) for path in paths):
                raise ValueError(f"modules_to_save has {name}")
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=r, **options))
    except (TypeError, ValueError) as error:
        names = sorted({path.rpartition(".")[2] for path in paths})
        raise Impossible(
            "peft refuses these options of LoRA",
            why=f"{error}; the model's modules are {', '.join(names)}",
            fix="change model.lora; peft's documentation lists the options of LoraConfig",
        ) from error
    return adapted


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
        id(module.weight)
        for module in sketch.modules()
        if (
            isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        )  # GPT-2's linear layer
        and module is not output
        and isinstance(module.weight, nn.Parameter)
        and not module.weight.requires_grad
    }


def keep_training_kernels(model: nn.Module) -> None:
    """Compute an evaluation with the kernels of training.

    On CPUs with AVX512-BF16, bitsandbytes would repack the weights at the first evaluation, in
    place, for a faster kernel with other rounding.
    """
    for layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False
