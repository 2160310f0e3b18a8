"""Settings by the names that transformers, TRL and peft use: data for error messages and docs.

Names that are near ours, such as weight_decay, need no entry: the nearest name is suggested anyway.
"""

from collections.abc import Mapping

_LORA = "model.lora: {r: 16, lora_alpha: 32, …}"
HUGGING_FACE_NAMES: Mapping[str, str] = {
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps (leave it out instead of -1)",
    "per_device_train_batch_size": "train.micro_batch_size, and train.global_batch_size for all ranks",
    "gradient_accumulation_steps": "train.global_batch_size: micro-batch x accumulation x ranks",
    "batch_size": "train.global_batch_size (all ranks together)",
    "train_batch_size": "train.global_batch_size (all ranks together)",
    "optim": "train.optimizer (adamw_torch is adamw; adamw_bnb_8bit is bitsandbytes.optim:AdamW8bit)",
    "lr": "train.learning_rate",
    "adam_beta1": "train.optimizer_options: {betas: [0.9, 0.999]}",
    "adam_beta2": "train.optimizer_options: {betas: [0.9, 0.999]}",
    "adam_epsilon": "train.optimizer_options: {eps: 1e-8}",
    "max_grad_norm": "train.clip_norm",
    "lr_scheduler_type": "train.schedule (polynomial is linear, constant_with_warmup is constant)",
    "warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup (as a share: 3% instead of 0.03)",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "dtype": "model.torch_dtype",
    "gradient_checkpointing": "train.activation_checkpointing: full",
    "fsdp": "distributed.strategy: fsdp",
    "base_model": "model.model_name_or_path",
    "r": _LORA,
    "lora_r": _LORA,
    "lora_alpha": _LORA,
    "target_modules": _LORA,
    "dataset_name": "data.hugging_face",
    "train_file": "data.files",
    "validation_file": "data.evaluation",
    "dataset_text_field": "data.columns: {text: FIELD}",
    "max_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "block_size": "data.sequence_length",
    "packing": "data.pack",
    "output_dir": "checkpoint.folder, or --runs FOLDER for everything that a run writes",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "load_best_model_at_end": "checkpoint.keep_best",
    "metric_for_best_model": "checkpoint.keep_best (the loss is measured)",
    "eval_steps": "train.evaluate_every",
    "logging_steps": "train.log_every",
    "report_to": "metrics.sinks: [wandb]",
    "run_name": "experiment_name",
}


def our_setting(path: str) -> str:
    """Return how to fix a Hugging Face name in the settings; "" for any other name."""
    setting = HUGGING_FACE_NAMES.get(path.rpartition(".")[2])
    return "" if setting is None else f"use {setting}"
