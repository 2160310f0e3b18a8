"""Train models and ask them for logits; load what a training left, as its user does, and ask again."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tiny_models
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.train.trainer import Trainer
from torchmuster.train.world import World
from torchmuster.worker import exported, training

IDS = torch.tensor([[3, 41, 59, 26, 5, 35], [2, 71, 82, 81, 8, 28]])
TEXTS = [*tiny_models.LINES[:3], "Ünknown <|im_end|> words\n\n  <think>"]


def make_and_train(
    world: World,
    folder: str,
    models: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, tuple[str, Mapping[str, str]]],
) -> dict[str, torch.Tensor]:
    """Make the models, train each run in its folder, and return the logits of each trained model."""
    from torchmuster.train.world import rank_zero_first

    os.chdir(folder)
    with rank_zero_first(world):
        if world.is_first:
            for name, described in models.items():
                tiny_models.make_model(Path(name), **described)
    answers = {}
    for name, (run_folder, settings) in runs.items():
        flags = [Flag(flag="--set", path=path, text=text) for path, text in settings.items()]
        asked = _Asked()
        # The same checks as in the fresh process, without the time that its imports take.
        in_process = mock.patch.object(
            training,
            "run_exporter",
            lambda request, limit_s: exported.check(Path(request.folder), request),
        )
        with mock.patch.object(training, "Trainer", asked), in_process:
            training.train_from_settings(
                resolve_settings(flags=flags).settings, world, Path(run_folder)
            )
        answers[name] = asked.logits
    return answers


class _Asked:
    """A Trainer whose model is asked for logits when it has been trained."""

    logits: torch.Tensor

    def __call__(self, *arguments: Any, **options: Any) -> Trainer:
        trainer = Trainer(*arguments, **options)
        fit = trainer.fit

        def fit_and_ask(**until: Any) -> Any:
            last = fit(**until)
            trainer.model.eval()
            with torch.no_grad():
                self.logits = trainer.model(input_ids=IDS).logits
            return last

        trainer.fit = fit_and_ask  # type: ignore[method-assign]
        return trainer


def load(world: World, folders: Mapping[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    """Load models and adapters by each function that their user would call; return the logits of each."""
    import peft
    from transformers import AutoModelForCausalLM

    os.chdir("/")  # nothing may depend on the folder that the training was started in
    how: dict[str, Any] = {"local_files_only": True}
    answers = {}
    for name, folder in folders.items():
        loaded = {"transformers": AutoModelForCausalLM.from_pretrained(folder, **how)}
        if (Path(folder) / "adapter_config.json").is_file():
            config = peft.PeftConfig.from_pretrained(folder)
            base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, **how)
            loaded["peft"] = peft.AutoPeftModelForCausalLM.from_pretrained(folder, **how)
            loaded["on a base"] = peft.PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            answers[name] = {how: one.eval()(input_ids=IDS).logits for how, one in loaded.items()}
    return answers


def tokenize(world: World, folders: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what the tokenizer of each folder makes of texts and of a chat."""
    from transformers import AutoTokenizer

    os.chdir("/")
    answers = {}
    for name, folder in folders.items():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        chat = None
        if tokenizer.chat_template is not None:
            chat = tokenizer.apply_chat_template(tiny_models.CHAT, add_generation_prompt=True)
        answers[name] = {
            "class": type(tokenizer).__name__,
            "ids": tokenizer(TEXTS)["input_ids"],
            "decoded": tokenizer.batch_decode(tokenizer(TEXTS)["input_ids"]),
            "chat": None if chat is None else list(chat["input_ids"]),
            "special": dict(tokenizer.special_tokens_map),
            "longest": tokenizer.model_max_length,
        }
    return answers
