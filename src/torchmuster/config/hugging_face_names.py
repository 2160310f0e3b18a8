"""Settings by the names that transformers, TRL and peft use: data for error messages and docs."""

from collections.abc import Mapping
from dataclasses import dataclass

_WHOLE_BATCH = "train.global_batch_size = {per_device_train_batch_size} x {gradient_accumulation_steps} x ranks"

_BETAS = "train.optimizer_options: {{betas: [{adam_beta1}, {adam_beta2}]}}"


@dataclass(frozen=True, kw_only=True)
class OurSetting:
    """The setting for a Hugging Face name; ``how`` says how to convert the value, if it differs.

    Names in braces in ``how`` stand for the values of other Hugging Face names in the same file.
    """

    path: str
    how: str = ""


HUGGING_FACE_NAMES: Mapping[str, OurSetting] = {
    # The length of training and the batch
    "num_train_epochs": OurSetting(path="train.epochs"),
    "num_epochs": OurSetting(path="train.epochs"),
    "max_steps": OurSetting(path="train.steps", how="leave it out instead of -1"),
    "per_device_train_batch_size": OurSetting(
        path="train.micro_batch_size", how=f"and {_WHOLE_BATCH}"
    ),
    "train_batch_size": OurSetting(path="train.global_batch_size", how="of all ranks together"),
    "batch_size": OurSetting(path="train.global_batch_size", how="of all ranks together"),
    "per_device_eval_batch_size": OurSetting(
        path="train.micro_batch_size", how="evaluations use the same size"
    ),
    "gradient_accumulation_steps": OurSetting(path="train.global_batch_size", how=_WHOLE_BATCH),
    "auto_find_batch_size": OurSetting(
        path="train.micro_batch_size", how="muster plan finds the largest one"
    ),
    # Optimizer and learning rate
    "optim": OurSetting(
        path="train.optimizer",
        how="adamw_torch and adamw_torch_fused are adamw; adamw_bnb_8bit is adamw_8bit",
    ),
    "lr": OurSetting(path="train.learning_rate"),
    "learning_rate": OurSetting(path="train.learning_rate"),
    "weight_decay": OurSetting(path="train.weight_decay"),
    "adam_beta1": OurSetting(path="train.optimizer_options", how=_BETAS),
    "adam_beta2": OurSetting(path="train.optimizer_options", how=_BETAS),
    "adam_epsilon": OurSetting(
        path="train.optimizer_options", how="train.optimizer_options: {{eps: {adam_epsilon}}}"
    ),
    "max_grad_norm": OurSetting(path="train.clip_norm"),
    "lr_scheduler_type": OurSetting(
        path="train.schedule",
        how="polynomial is linear, constant_with_warmup is constant, cosine_with_min_lr is cosine",
    ),
    "lr_scheduler_kwargs": OurSetting(
        path="train.min_learning_rate",
        how="min_lr is train.min_learning_rate",
    ),
    "warmup_steps": OurSetting(path="train.warmup"),
    "warmup_ratio": OurSetting(path="train.warmup", how="as a share: 3% instead of 0.03"),
    # Precision and memory
    "bf16": OurSetting(path="train.precision", how="train.precision: bf16"),
    "fp16": OurSetting(path="train.precision", how="train.precision: fp16"),
    "dtype": OurSetting(path="model.torch_dtype"),
    "torch_dtype": OurSetting(path="model.torch_dtype"),
    "gradient_checkpointing": OurSetting(
        path="train.activation_checkpointing", how="train.activation_checkpointing: full"
    ),
    "torch_compile": OurSetting(path="train.compile"),
    "fsdp": OurSetting(path="distributed.strategy", how="distributed.strategy: fsdp"),
    "ddp_find_unused_parameters": OurSetting(path="distributed.find_unused_parameters"),
    # Model and LoRA
    "model_name": OurSetting(path="model.model_name_or_path"),
    "model_name_or_path": OurSetting(path="model.model_name_or_path"),
    "base_model": OurSetting(path="model.model_name_or_path"),
    **dict.fromkeys(
        ("r", "lora_r", "lora_alpha", "target_modules", "lora_target_modules"),
        OurSetting(path="model.lora", how="model.lora: {{r: 16, lora_alpha: 32, …}}"),
    ),
    # Data
    "dataset_name": OurSetting(path="data.hugging_face"),
    "train_file": OurSetting(path="data.files"),
    "validation_file": OurSetting(path="data.evaluation"),
    "dataset_text_field": OurSetting(
        path="data.columns", how="data.columns: {{text: {dataset_text_field}}}"
    ),
    "max_seq_length": OurSetting(path="data.sequence_length"),
    "max_length": OurSetting(path="data.sequence_length"),
    "block_size": OurSetting(path="data.sequence_length"),
    "packing": OurSetting(path="data.pack"),
    "dataloader_num_workers": OurSetting(path="data.workers"),
    "data_seed": OurSetting(path="train.seed", how="one seed for everything"),
    # Checkpoints, evaluation and logging
    "output_dir": OurSetting(
        path="checkpoint.folder", how="or --runs FOLDER for everything that a run writes"
    ),
    "save_steps": OurSetting(path="checkpoint.every"),
    "save_strategy": OurSetting(
        path="checkpoint.every",
        how="a number of steps, a duration or never; best: checkpoint.keep_best",
    ),
    "save_total_limit": OurSetting(path="checkpoint.keep"),
    "resume_from_checkpoint": OurSetting(
        path="checkpoint.folder", how="not a setting: muster train --resume RUN"
    ),
    "load_best_model_at_end": OurSetting(
        path="checkpoint.keep_best", how="and muster checkpoint export RUN best --to FOLDER"
    ),
    "metric_for_best_model": OurSetting(path="checkpoint.keep_best", how="the loss is measured"),
    "eval_steps": OurSetting(path="train.evaluate_every"),
    "eval_strategy": OurSetting(
        path="train.evaluate_every", how="leave it out to evaluate after each epoch"
    ),
    "logging_steps": OurSetting(path="train.log_every"),
    "report_to": OurSetting(path="metrics.sinks", how="a list: [wandb]"),
    "run_name": OurSetting(path="experiment_name"),
}


def our_setting(path: str, others: Mapping[str, str]) -> str:
    """Return how to fix a Hugging Face name in the settings; "" for any other name.

    ``others`` has the values next to it, by name.
    """
    name = path.rpartition(".")[2]
    known = HUGGING_FACE_NAMES.get(name)
    if known is None or (known.path.endswith(f".{name}") and not known.how):
        return ""  # for our own name in another section, the usual suggestion is enough
    how = known.how.format_map(_OwnNames(others))
    if how.startswith(known.path):
        return f"use {how}"
    return f"use {known.path}" + (f" ({how})" if how else "")


class _OwnNames(dict[str, str]):
    """Values by name; a name without a value stands for itself."""

    def __missing__(self, name: str) -> str:
        return name
