"""Settings by the names that transformers, TRL and peft use: data for error messages and docs."""

from collections.abc import Mapping

_WHOLE_BATCH = "train.global_batch_size = {per_device_train_batch_size} x {gradient_accumulation_steps} x ranks"

_BETAS = "train.optimizer_options: {{betas: [{adam_beta1}, {adam_beta2}]}}"


# Our setting for each name, and how to convert the value if it differs. Names in braces stand for the
# values of other Hugging Face names in the same file.
HUGGING_FACE_NAMES: Mapping[str, tuple[str, str]] = {
    # The length of training and the batch
    "num_train_epochs": ("train.epochs", ""),
    "num_epochs": ("train.epochs", ""),
    "max_steps": ("train.steps", "leave it out instead of -1"),
    "per_device_train_batch_size": ("train.micro_batch_size", f"and {_WHOLE_BATCH}"),
    "train_batch_size": ("train.global_batch_size", "of all ranks together"),
    "batch_size": ("train.global_batch_size", "of all ranks together"),
    "per_device_eval_batch_size": ("train.micro_batch_size", "evaluations use the same size"),
    "gradient_accumulation_steps": ("train.global_batch_size", _WHOLE_BATCH),
    "auto_find_batch_size": ("train.micro_batch_size", "muster plan finds the largest one"),
    # Optimizer and learning rate
    "optim": (
        "train.optimizer",
        "adamw_torch and adamw_torch_fused are adamw; adamw_bnb_8bit is bitsandbytes.optim:AdamW8bit",
    ),
    "lr": ("train.learning_rate", ""),
    "learning_rate": ("train.learning_rate", ""),
    "weight_decay": ("train.weight_decay", ""),
    "adam_beta1": ("train.optimizer_options", _BETAS),
    "adam_beta2": ("train.optimizer_options", _BETAS),
    "adam_epsilon": ("train.optimizer_options", "train.optimizer_options: {{eps: {adam_epsilon}}}"),
    "max_grad_norm": ("train.clip_norm", ""),
    "lr_scheduler_type": (
        "train.schedule",
        "polynomial is linear, constant_with_warmup is constant, cosine_with_min_lr is cosine",
    ),
    "lr_scheduler_kwargs": ("train.min_learning_rate", "min_lr is train.min_learning_rate"),
    "warmup_steps": ("train.warmup", ""),
    "warmup_ratio": ("train.warmup", "as a share: 3% instead of 0.03"),
    # Precision and memory
    "bf16": ("train.precision", "train.precision: bf16"),
    "fp16": ("train.precision", "train.precision: fp16"),
    "dtype": ("model.torch_dtype", ""),
    "torch_dtype": ("model.torch_dtype", ""),
    "gradient_checkpointing": (
        "train.activation_checkpointing",
        "train.activation_checkpointing: full",
    ),
    "torch_compile": ("train.compile", ""),
    "fsdp": ("distributed.strategy", "distributed.strategy: fsdp"),
    "ddp_find_unused_parameters": ("distributed.find_unused_parameters", ""),
    # Model and LoRA
    "model_name": ("model.model_name_or_path", ""),
    "model_name_or_path": ("model.model_name_or_path", ""),
    "base_model": ("model.model_name_or_path", ""),
    **dict.fromkeys(
        ("r", "lora_r", "lora_alpha", "target_modules", "lora_target_modules"),
        ("model.lora", "model.lora: {{r: 16, lora_alpha: 32, …}}"),
    ),
    # Data
    "dataset_name": ("data.hugging_face", ""),
    "train_file": ("data.files", ""),
    "validation_file": ("data.evaluation", ""),
    "dataset_text_field": ("data.columns", "data.columns: {{text: {dataset_text_field}}}"),
    "max_seq_length": ("data.sequence_length", ""),
    "max_length": ("data.sequence_length", ""),
    "block_size": ("data.sequence_length", ""),
    "packing": ("data.pack", ""),
    "dataloader_num_workers": ("data.workers", ""),
    "data_seed": ("train.seed", "one seed for everything"),
    # Checkpoints, evaluation and logging
    "output_dir": ("checkpoint.folder", "or --runs FOLDER for everything that a run writes"),
    "save_steps": ("checkpoint.every", ""),
    "save_strategy": (
        "checkpoint.every",
        "a number of steps, a duration or never; best: checkpoint.keep_best",
    ),
    "save_total_limit": ("checkpoint.keep", ""),
    "resume_from_checkpoint": ("checkpoint.folder", "not a setting: muster train --resume RUN"),
    "load_best_model_at_end": (
        "checkpoint.keep_best",
        "and muster checkpoint export RUN best --to FOLDER",
    ),
    "metric_for_best_model": ("checkpoint.keep_best", "the loss is measured"),
    "eval_steps": ("train.evaluate_every", ""),
    "eval_strategy": ("train.evaluate_every", "leave it out to evaluate after each epoch"),
    "logging_steps": ("train.log_every", ""),
    "report_to": ("metrics.sinks", "a list: [wandb]"),
    "run_name": ("experiment_name", ""),
}


def our_setting(path: str, neighbours: Mapping[str, str]) -> str:
    """Return how to fix a Hugging Face name in the settings; "" for any other name.

    ``neighbours`` has the values next to it, by name.
    """
    name = path.rpartition(".")[2]
    known, how = HUGGING_FACE_NAMES.get(name, ("", ""))
    if not known or (known.endswith(f".{name}") and not how):
        return ""  # for our own name in another section, the usual suggestion is enough
    how = how.format_map(_OwnNames(neighbours))
    if how.startswith(known):
        return f"use {how}"
    return f"use {known}" + (f" ({how})" if how else "")


class _OwnNames(dict[str, str]):
    """Values by name; a name without a value stands for itself."""

    def __missing__(self, name: str) -> str:
        return name
