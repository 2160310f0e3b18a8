"""Every setting there is: its name, type, limits, default and one line of help.

This file is the single source for the YAML file, the environment variables, the flags, the JSON
Schema and the reference page. A part of the product that needs a setting adds it here.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

GpuId: TypeAlias = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How many devices take part in the run, which ones, and how the work is split."""

    enabled: Annotated[
        bool, Meta(description="Run one process per device; false means one process on one device.")
    ] = True
    num_gpus: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="How many GPUs to use; all visible ones if left out."),
    ] = None
    gpu_ids: Annotated[
        Annotated[tuple[GpuId, ...], Meta(min_length=1)] | None,
        Meta(description="Which GPUs: nvidia-smi numbers, UUIDs or unique beginnings of UUIDs."),
    ] = None
    strategy: Annotated[
        Literal["auto", "ddp", "fsdp"],
        Meta(description="ddp copies the model to each GPU, fsdp shards it; auto decides."),
    ] = "auto"
    fsdp_sharding_strategy: Annotated[
        Literal["full_shard", "shard_grad_op", "hybrid_shard"],
        Meta(description="What fsdp shards; only used with strategy fsdp."),
    ] = "full_shard"
    fsdp_shard_size: Annotated[
        Count | None,
        Meta(
            description="hybrid_shard: ranks that share one copy of the model; those of a machine if "
            "left out."
        ),
    ] = None
    fsdp_cpu_offload: Annotated[
        bool, Meta(description="Keep fsdp's shards in host memory: slower, fits larger models.")
    ] = False
    find_unused_parameters: Annotated[
        bool,
        Meta(description="Let ddp go on without parameters that a step does not use: slower."),
    ] = False
    master_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="TCP port on which the processes meet; a free one if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, how its weights are held, and what it is trained to do."""

    model_name_or_path: Annotated[
        Text | None,
        Meta(
            description="A language model: a local folder, or its name on the Hugging Face hub. "
            "A folder with only config.json is built with random weights."
        ),
    ] = None
    build: Annotated[
        Text | None,
        Meta(description="module:function of yours that returns the model, instead of a name."),
    ] = None
    device_map: Annotated[
        Literal["auto", "cuda", "cpu"],
        Meta(
            description="Which kind of device is trained on; each rank has one. "
            "auto takes GPUs where there are some."
        ),
    ] = "auto"
    torch_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Meta(
            description="Number type of the weights; if left out, float32 for a model given by its "
            "name, and a model of your own as it is. auto keeps the one of the model's files: "
            "16-bit weights take half the memory, and lose small updates."
        ),
    ] = None
    attention: Annotated[
        Literal["sdpa", "eager"],
        Meta(description="How a model given by its name computes attention: sdpa is torch's own."),
    ] = "sdpa"
    loss: Annotated[
        Text | None,
        Meta(
            description="cross_entropy, language_model, or module:function of yours; "
            "language_model for a model given by its name, else cross_entropy."
        ),
    ] = None
    lora_rank: Annotated[
        Count | None,
        Meta(
            description="Train LoRA matrices of this rank beside frozen weights; off if left out."
        ),
    ] = None
    lora_alpha: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Scale of the LoRA matrices; twice the rank if left out."),
    ] = None
    lora_targets: Annotated[
        Annotated[tuple[Text, ...], Meta(min_length=1)] | None,
        Meta(description="Which layers get LoRA matrices, such as q_proj; by kind if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on, and how it becomes batches."""

    dataset: Annotated[
        Text | None,
        Meta(description="module:function of yours that returns a dataset."),
    ] = None
    files: Annotated[
        Text | tuple[Text, ...] | None,
        Meta(
            description="Text files: a path, a pattern or a URL such as s3://a/*.jsonl, or a list."
        ),
    ] = None
    hugging_face: Annotated[
        Text | None,
        Meta(description="A dataset of text: a local folder, or its name on the Hugging Face hub."),
    ] = None
    split: Annotated[Text, Meta(description="Which split of the Hugging Face dataset.")] = "train"
    text_field: Annotated[
        Text, Meta(description="The field that holds the text, where a record has several.")
    ] = "text"
    tokenizer: Annotated[
        Text | None,
        Meta(
            description="bytes, a local folder, or a name on the hub; "
            "that of model_name_or_path if left out."
        ),
    ] = None
    sequence_length: Annotated[
        Annotated[int, Meta(ge=2)], Meta(description="Tokens in a row of a batch.")
    ] = 1024
    pack: Annotated[
        bool,
        Meta(description="Fill rows with several texts; false pads each text to a row of its own."),
    ] = True
    shuffle: Annotated[bool, Meta(description="Another order in each epoch, by the seed.")] = True
    workers: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="Processes for each rank that read ahead; 0 reads in the rank itself."),
    ] = 0
    prefetch: Annotated[
        Count, Meta(description="Batches that each worker has ready, where there are workers.")
    ] = 2
    evaluation_dataset: Annotated[
        Text | None,
        Meta(description="module:function of yours that returns what is evaluated on."),
    ] = None
    evaluation_files: Annotated[
        Text | tuple[Text, ...] | None,
        Meta(description="Text files to evaluate on, as data.files."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, in which steps, and with which optimiser."""

    epochs: Annotated[
        Count | None,
        Meta(description="How often the data is gone through; 1 if steps is left out."),
    ] = None
    steps: Annotated[
        Count | None, Meta(description="How many steps of the optimiser, instead of epochs.")
    ] = None
    global_batch_size: Annotated[
        Count | None,
        Meta(description="Samples in a step, over all ranks; one micro-batch of each if left out."),
    ] = None
    micro_batch_size: Annotated[
        Count | None,
        Meta(description="Samples that a rank computes at once; 8 if nothing else says it."),
    ] = None
    micro_batch_sizes: Annotated[
        Annotated[tuple[Count, ...], Meta(min_length=1)] | None,
        Meta(description="The same for each rank, where the cards differ: [8, 8, 2]."),
    ] = None
    optimizer: Annotated[
        Literal["adamw", "sgd"], Meta(description="adamw, or sgd with momentum 0.9.")
    ] = "adamw"
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="The highest learning rate.")
    ] = 1e-3
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0)], Meta(description="Weight decay of the optimiser.")
    ] = 0.01
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="How the learning rate goes after the warm-up; linear and cosine to 0."),
    ] = "constant"
    warmup_steps: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="Steps in which the learning rate rises.")
    ] = 0
    clip_norm: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Longest gradient, as a 2-norm; off if left out."),
    ] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Meta(description="Number type of the computation; auto takes what all ranks' cards can."),
    ] = "auto"
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**32 - 1)],
        Meta(description="Decides the first weights, the order of the data and dropout."),
    ] = 0
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective"] | Count,
        Meta(
            description="Compute activations again in the backward to save memory: "
            "full for every block, 2 for every second one, selective keeps matrix products."
        ),
    ] = "none"
    compile: Annotated[bool, Meta(description="Compile each block with torch.compile.")] = False
    on_bad_numbers: Annotated[
        Literal["skip", "stop"],
        Meta(description="What all ranks do with a step that has NaN or Inf in it."),
    ] = "skip"
    log_every: Annotated[Count, Meta(description="Steps between two lines of the log.")] = 10
    evaluate_every: Annotated[
        Count | None,
        Meta(description="Steps between two evaluations; after each epoch if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of a training is saved, where, and how many of them are kept."""

    enabled: Annotated[
        bool,
        Meta(description="Save the training's state as it goes, and at its end; false: never."),
    ] = True
    every: Annotated[
        Count | Text,
        Meta(description="How often: a number of steps, or a time such as 10min or 1h."),
    ] = "10min"
    keep: Annotated[
        Count, Meta(description="How many of the newest are kept; older ones are deleted.")
    ] = 3
    folder: Annotated[
        Text | None,
        Meta(
            description="Where they go, in a folder of the run's name: a folder, or an address such "
            "as s3://bucket/place; the run's own folder if left out."
        ),
    ] = None
    mode: Annotated[
        Literal["auto", "async", "sync"],
        Meta(
            description="async writes while the training goes on, which takes host memory; "
            "auto does so where there is enough."
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where the numbers of a run go besides its folder and Prometheus."""

    sinks: Annotated[
        tuple[Literal["tensorboard", "parquet", "mlflow", "wandb"], ...],
        Meta(
            description="Who gets them, sent by a process beside rank 0: tensorboard and parquet "
            "are files in the run's folder, mlflow and wandb are trackers."
        ),
    ] = ()
    mlflow_uri: Annotated[
        Text | None,
        Meta(
            description="Where MLflow is: http://…, or sqlite:///… on a disk; MLFLOW_TRACKING_URI of "
            "rank 0's environment if left out. Passwords belong in the environment."
        ),
    ] = None
    mlflow_experiment: Annotated[
        Text | None, Meta(description="MLflow's experiment; experiment_name if left out.")
    ] = None
    wandb_project: Annotated[
        Text | None, Meta(description="W&B's project; experiment_name if left out.")
    ] = None
    wandb_mode: Annotated[
        Literal["offline", "online"],
        Meta(
            description="offline writes files into the run's folder, which wandb sync sends later; "
            "online sends as it goes, with WANDB_API_KEY of rank 0's environment."
        ),
    ] = "offline"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """On which machines the run is started, and what happens when it fails."""

    hosts: Annotated[
        Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] | None,
        Meta(description="Machines by the names ssh knows, first one first: a, b:4 (4 ranks), c."),
    ] = None
    max_restarts: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="How often in a row the whole run is started again after failures, counted anew "
            "after each checkpoint; if left out, 3 times by muster train, else 0."
        ),
    ] = None
    remote_python: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Python on the other machines; the same path as here if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    experiment_name: Annotated[
        str, Meta(min_length=1, description="Names the run folder and the tracker's run.")
    ] = "experiment"
    distributed: Distributed = field(default_factory=Distributed)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
