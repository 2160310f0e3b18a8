"""LoRA through peft: train small matrices next to frozen weights."""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchmuster.checkpoints.export import ADAPTER_WEIGHTS, name_in_adapter
from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.train.weights import whole_tensor
from torchmuster.train.world import World

INSTALL = "pip install 'torchmuster[lora]'"
_ADAPTER = "default"  # peft's name for a single adapter


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    dropout: float = 0.0,
    modules_to_save: Sequence[str] | None = None,
    use_dora: bool = False,
    use_rslora: bool = False,
) -> Decision[nn.Module]:
    """Freeze a model and add matrices of this rank to the targets; only those are trained."""
    peft = _peft()
    chosen = _targets(model, targets)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=chosen.value,
        lora_dropout=dropout,
        modules_to_save=None if modules_to_save is None else list(modules_to_save),
        use_dora=use_dora,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
    )
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks transformers 5.23 for an attribute by its old name.
            warnings.simplefilter("ignore", FutureWarning)
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise Impossible(
            f"none of the LoRA targets is in the model: {', '.join(targets or ['any'])}",
            why="the model's layers are "
            f"{', '.join(_names_of_layers(model)) or 'of no supported kind'}",
            fix="set lora_targets to some of these",
        ) from error
    return Decision(value=adapted, reason=chosen.reason)


def save_adapters(
    model: nn.Module,
    state: Mapping[str, Any],
    folder: Path,
    world: World,
    *,
    beside: Path | None = None,
) -> None:
    """Write the trained adapter for peft: ``PeftModel.from_pretrained(model, folder)``.

    ``state`` is the model's, full or sharded, and is gathered one matrix at a time. The files of
    the folder ``beside`` are copied next to it. All ranks call this; rank 0 writes.
    """
    from safetensors.torch import save_file

    adapters: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        name_in_file = name_in_adapter(name)
        if name_in_file is None:
            continue
        whole = whole_tensor(value)
        if world.is_first:
            adapters[name_in_file] = whole.detach().cpu().contiguous()
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        if beside is not None:
            shutil.copytree(beside, folder, dirs_exist_ok=True)
        save_file(adapters, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        peft_config(model).save_pretrained(folder)


def peft_config(model: nn.Module) -> Any:
    """Return a model's peft config, through any wrappers; None if it has none."""
    for module in model.modules():
        adapters: Any = getattr(module, "peft_config", None)
        if adapters is not None:
            return adapters[_ADAPTER]
    return None


def _targets(model: nn.Module, asked: Sequence[str] | None) -> Decision[list[str] | str]:
    if asked is not None:
        return Decision(value=list(asked), reason=f"LoRA on {', '.join(asked)}: requested")
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in KNOWN:
        names = list(KNOWN[kind])
        return Decision(
            value=names, reason=f"LoRA on {', '.join(names)}: peft's targets for {kind} models"
        )
    return Decision(
        value="all-linear",
        reason="LoRA on every linear layer: peft has no targets for this kind of model",
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
