"""What belongs to a model next to its weights, in the run's folder: ``final`` and exports take it from there."""

from pathlib import Path

from torch import nn

from torchmuster.errors import Impossible, MusterError
from torchmuster.train.data.streams.tokenising import Tokenizer, TransformersTokenizer
from torchmuster.train.first import first
from torchmuster.train.models import hugging_face, lora
from torchmuster.train.models.making import Recipe
from torchmuster.train.weights import replaced_folder
from torchmuster.train.world import World
from torchmuster.worker.speaking import say

_OF_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")


def write_model_files(
    folder: Path, recipe: Recipe, tokenizer: Tokenizer | None, model: nn.Module, world: World
) -> None:
    """Write the model's config, or that of its LoRA adapter, and the tokenizer; rank 0 writes, all ranks call it."""
    with first(world):
        if not world.is_first:
            return
        try:
            with replaced_folder(folder) as unfinished:
                if recipe.files is not None:
                    hugging_face.save_configs(recipe.files, unfinished)
                if recipe.lora is not None:
                    # Next to a config.json, an adapter would be taken for a whole model.
                    (unfinished / "config.json").unlink(missing_ok=True)
                    lora.peft_config(model).save_pretrained(unfinished)
                _save_tokenizer(unfinished, recipe, tokenizer, world)
        except OSError as error:
            raise MusterError(
                f"the model's config and tokenizer cannot be written to {folder}",
                why=error.strerror or str(error),
                fix="make room there, or use another folder for runs",
            ) from error


def _save_tokenizer(
    folder: Path, recipe: Recipe, tokenizer: Tokenizer | None, world: World
) -> None:
    """Save the tokenizer that the training uses, else the one that the model's folder has."""
    if isinstance(tokenizer, TransformersTokenizer):
        tokenizer.save(folder)
        return
    source = None if recipe.files is None else recipe.files.folder
    if source is None or not any(any(source.glob(kind)) for kind in _OF_TOKENIZERS):
        return
    try:
        hugging_face.save_tokenizer(hugging_face.load_tokenizer(str(source)), folder)
    except Impossible as error:
        say(world, f"the weights will have no tokenizer next to them: {error.what} ({error.why})")
