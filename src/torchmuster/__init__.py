"""torchmuster: launch, check, plan and watch distributed PyTorch training.

Importing the package does nothing: a public name is imported when it is first used, so the names that need torch
cost nothing before. Start with the command ``muster --help``, from Python with ``from torchmuster import Trainer``
(the page "Python API" of the documentation describes all names), or in a notebook with ``%load_ext torchmuster``.
"""

__version__ = "0.2.0"

# Public name -> module. tests/golden freezes the names and their signatures.
_MODULES = {
    # training
    "Trainer": "torchmuster.train.trainer",
    "Evaluation": "torchmuster.train.trainer",
    "TrainStep": "torchmuster.train.step",
    "World": "torchmuster.train.world",
    "join_world": "torchmuster.train.world",
    "rank_zero_first": "torchmuster.train.world",
    "sum_over_ranks": "torchmuster.train.world",
    "evaluate": "torchmuster.train.evaluate",
    "cross_entropy": "torchmuster.train.losses",
    "language_model": "torchmuster.train.losses",
    "schedule": "torchmuster.train.optimizers",
    "seed_everything": "torchmuster.train.seeds",
    "oom_report": "torchmuster.train.out_of_memory",
    "BadNumbers": "torchmuster.train.bad_numbers",
    "StopRequest": "torchmuster.train.stop_request",
    "StoppedAtRequest": "torchmuster.train.stop_request",
    "Reports": "torchmuster.train.reports",
    # any script under muster run
    "log": "torchmuster.integrations.recorder",
    "log_evaluation": "torchmuster.integrations.recorder",
    # strategies and precision
    "ModelSizes": "torchmuster.train.strategies.choose",
    "choose_strategy": "torchmuster.train.strategies.choose",
    "build_strategy": "torchmuster.train.strategies.choose",
    "Sharding": "torchmuster.train.strategies.sharding",
    "choose_precision": "torchmuster.train.precision",
    # data
    "BatchLoader": "torchmuster.train.data.loader",
    "StreamLoader": "torchmuster.train.data.stream",
    "DataLoaderAdapter": "torchmuster.train.data.dataloader_adapter",
    "ignore_signals_in_workers": "torchmuster.train.data.worker_processes",
    # models
    "add_lora": "torchmuster.train.models.lora",
    "save_adapters": "torchmuster.train.models.lora",
    "recompute_blocks": "torchmuster.train.models.blocks",
    "compile_blocks": "torchmuster.train.models.blocks",
    "build_on_rank_0": "torchmuster.train.models.meta_init",
    "save_weights": "torchmuster.train.weights",
    # checkpoints
    "Checkpointer": "torchmuster.train.checkpointing.checkpointer",
    "CheckpointSettings": "torchmuster.train.checkpointing.saves",
    "open_store": "torchmuster.checkpoints.store",
    "newest_good": "torchmuster.checkpoints.verify",
    # errors and findings
    "MusterError": "torchmuster.errors",
    "Finding": "torchmuster.finding",
    "Decision": "torchmuster.decision",
    "explain_text": "torchmuster.known_errors.explain",
    # GPUs, process groups and the legacy API
    **dict.fromkeys(
        (
            "DDPTrainer",
            "GPUMonitor",
            "ProductionTrainer",
            "auto_select_gpus_for_model",
            "benchmark_matmul",
            "cleanup_distributed",
            "create_distributed_dataloader",
            "get_available_gpus",
            "get_device_info",
            "get_gpu_info",
            "get_gpu_memory_usage",
            "get_group_info",
            "get_local_rank",
            "get_optimal_device",
            "print_gpu_info",
            "reduce_mean",
            "select_gpus",
            "set_visible_gpus",
            "setup_distributed",
            "setup_gpu_environment",
            "sync_gradients",
            "verify_gpu_communication",
        ),
        "torchmuster.distributed",
    ),
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return [*globals(), *_MODULES]


def load_ipython_extension(shell: object) -> None:
    """Add ``%muster``, ``%%ranks`` and ``%%rank`` to a notebook: what ``%load_ext torchmuster`` calls."""
    from torchmuster.notebook import magics

    magics.load(shell)
