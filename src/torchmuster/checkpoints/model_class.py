"""Choose the transformers class of a model from its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster import untrusted
from torchmuster.decision import Decision


@dataclass(frozen=True, kw_only=True)
class ModelClass:
    """A kind of model: the auto class of transformers that loads it, and its default loss."""

    what: str
    auto: str
    loss: str  # a value of model.loss


CAUSAL_LM = ModelClass(
    what="causal language model", auto="AutoModelForCausalLM", loss="language_model"
)
MASKED_LM = ModelClass(
    what="masked language model", auto="AutoModelForMaskedLM", loss="classification"
)
SEQUENCE_CLASSIFICATION = ModelClass(
    what="text classifier", auto="AutoModelForSequenceClassification", loss="classification"
)
IMAGE_CLASSIFICATION = ModelClass(
    what="image classifier", auto="AutoModelForImageClassification", loss="classification"
)
_BY_ENDING = {
    "ForMaskedLM": MASKED_LM,
    "ForSequenceClassification": SEQUENCE_CLASSIFICATION,
    "ForImageClassification": IMAGE_CLASSIFICATION,
}


def choose_model_class(config: Mapping[str, Any], *, images: bool = False) -> Decision[ModelClass]:
    """Choose the class by ``architectures`` in a config; ``images``: the data are image folders."""
    named = architecture_of(config)
    if images:
        return Decision(
            value=IMAGE_CLASSIFICATION,
            reason=f"{IMAGE_CLASSIFICATION.auto}: data.images has folders of images",
        )
    for ending, chosen in _BY_ENDING.items():
        if named.endswith(ending):
            return Decision(
                value=chosen, reason=f"{chosen.auto}: architectures in config.json has {named}"
            )
    why = (
        f"architectures in config.json has {named}" if named else "config.json has no architectures"
    )
    return Decision(value=CAUSAL_LM, reason=f"{CAUSAL_LM.auto}: {why}")


def class_in_folder(folder: Path) -> Decision[ModelClass]:
    """Choose the class of a model folder; a config that cannot be read is a causal one's."""
    return choose_model_class(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; {} if it cannot be read, which transformers reports."""
    return untrusted.read_json_object(folder / "config.json")


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first of the architectures that a config names; "" if it names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def set_dtype(folder: Path, dtype: str) -> None:
    """Write the dtype of the weights into config.json, if the folder has one."""
    config = read_config(folder)
    if not config:
        return
    config.pop("torch_dtype", None)  # its name before transformers 5
    config["dtype"] = dtype
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
