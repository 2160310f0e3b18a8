"""Every setting: its name, type, limits, default and one line of help.

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
    """How many devices the run uses, which ones, and how the work is split."""

    enabled: Annotated[
        bool, Meta(description="Run one process per device; false means one process on one device.")
    ] = True
    num_gpus: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Number of GPUs to use; all visible ones if left out."),
    ] = None
    gpu_ids: Annotated[
        Annotated[tuple[GpuId, ...], Meta(min_length=1)] | None,
        Meta(description="GPUs to use: nvidia-smi indices, UUIDs or unique prefixes of UUIDs."),
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
            description="With hybrid_shard, the number of ranks that share one copy of the model; "
            "all ranks of a host if left out."
        ),
    ] = None
    fsdp_cpu_offload: Annotated[
        bool, Meta(description="Keep fsdp's shards in host memory: slower, but fits larger models.")
    ] = False
    find_unused_parameters: Annotated[
        bool,
        Meta(description="Allow ddp steps that do not use all parameters; this is slower."),
    ] = False
    master_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="TCP port of the rendezvous; a free one if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model, the dtype of its weights, its loss and its LoRA matrices."""

    model_name_or_path: Annotated[
        Text | None,
        Meta(
            description="A model: a local folder, or its name on the Hugging Face hub. Its class "
            "follows from architectures in config.json. "
            "A folder with only config.json is built with random weights."
        ),
    ] = None
    build: Annotated[
        Text | None,
        Meta(
            description="Your module:function that returns the model, instead of model_name_or_path."
        ),
    ] = None
    device_map: Annotated[
        Literal["auto", "cuda", "cpu"],
        Meta(
            description="Type of device to train on; each rank uses one. "
            "auto uses GPUs if there are any."
        ),
    ] = "auto"
    torch_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Meta(
            description="dtype of the weights; if left out, float32 for a model given by name, "
            "and unchanged for a model of your own. auto keeps the dtype of the model's files: "
            "16-bit weights take half the memory, but lose small updates."
        ),
    ] = None
    attention: Annotated[
        Literal["sdpa", "eager"],
        Meta(description="Attention implementation of a model given by name: sdpa is torch's own."),
    ] = "sdpa"
    loss: Annotated[
        Text | None,
        Meta(
            description="cross_entropy, language_model, masked_language_model, classification, or "
            "your module:function; if left out, the loss of the class of a model given by name, "
            "else cross_entropy."
        ),
    ] = None
    lora_rank: Annotated[
        Count | None,
        Meta(
            description="Freeze the weights and train LoRA matrices of this rank; off if left out."
        ),
    ] = None
    lora_alpha: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Scale of the LoRA matrices; twice the rank if left out."),
    ] = None
    lora_targets: Annotated[
        Annotated[tuple[Text, ...], Meta(min_length=1)] | None,
        Meta(
            description="Layers that get LoRA matrices, such as q_proj; chosen by model type if "
            "left out."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training and evaluation data, and how it is batched."""

    dataset: Annotated[
        Text | None,
        Meta(description="Your module:function that returns a dataset."),
    ] = None
    files: Annotated[
        Text | tuple[Text, ...] | None,
        Meta(
            description="Text files: a path, a pattern or a URL such as s3://a/*.jsonl, or a list."
        ),
    ] = None
    hugging_face: Annotated[
        Text | None,
        Meta(description="Text dataset: a local folder, or its name on the Hugging Face hub."),
    ] = None
    images: Annotated[
        Text | None,
        Meta(description="Folder of images to classify, with one subfolder for each class."),
    ] = None
    split: Annotated[Text, Meta(description="Split of the Hugging Face dataset.")] = "train"
    text_field: Annotated[
        Text, Meta(description="The field that holds the text, if a record has several fields.")
    ] = "text"
    tokenizer: Annotated[
        Text | None,
        Meta(
            description="bytes, a local folder, or a name on the hub; "
            "the tokenizer of model_name_or_path if left out."
        ),
    ] = None
    sequence_length: Annotated[
        Annotated[int, Meta(ge=2)], Meta(description="Tokens per row of a batch.")
    ] = 1024
    pack: Annotated[
        bool,
        Meta(
            description="Pack several texts into a row; false pads each text to a row of its own."
        ),
    ] = True
    shuffle: Annotated[
        bool, Meta(description="Shuffle the data in each epoch, based on the seed.")
    ] = True
    workers: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="Worker processes per rank that read ahead; 0 reads in the rank itself."),
    ] = 0
    prefetch: Annotated[
        Count, Meta(description="Batches that each worker loads ahead; only used with workers.")
    ] = 2
    evaluation_dataset: Annotated[
        Text | None,
        Meta(description="Your module:function that returns the evaluation dataset."),
    ] = None
    evaluation_files: Annotated[
        Text | tuple[Text, ...] | None,
        Meta(description="Text files to evaluate on, given like data.files."),
    ] = None
    evaluation_images: Annotated[
        Text | None,
        Meta(description="Folder of images to evaluate on, with subfolders as in data.images."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Train:
    """Length of training, batch sizes, optimizer and precision."""

    epochs: Annotated[
        Count | None,
        Meta(description="Number of epochs; 1 if steps is left out."),
    ] = None
    steps: Annotated[
        Count | None, Meta(description="Number of optimizer steps, instead of epochs.")
    ] = None
    global_batch_size: Annotated[
        Count | None,
        Meta(description="Samples per step over all ranks; one micro-batch per rank if left out."),
    ] = None
    micro_batch_size: Annotated[
        Count | None,
        Meta(
            description="Samples per forward pass of a rank; 8 unless other settings determine it."
        ),
    ] = None
    micro_batch_sizes: Annotated[
        Annotated[tuple[Count, ...], Meta(min_length=1)] | None,
        Meta(description="The micro-batch size of each rank, if the GPUs differ: [8, 8, 2]."),
    ] = None
    optimizer: Annotated[
        Literal["adamw", "sgd"], Meta(description="adamw, or sgd with momentum 0.9.")
    ] = "adamw"
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="Peak learning rate.")
    ] = 1e-3
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0)], Meta(description="Weight decay of the optimizer.")
    ] = 0.01
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="Learning rate after the warm-up; linear and cosine decay to 0."),
    ] = "constant"
    warmup_steps: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="Number of steps over which the learning rate rises to its peak."),
    ] = 0
    clip_norm: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Max gradient norm (L2); off if left out."),
    ] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Meta(description="dtype of the computation; auto picks one that all ranks' GPUs support."),
    ] = "auto"
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**32 - 1)],
        Meta(description="Seed of the initial weights, the data order and dropout."),
    ] = 0
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective"] | Count,
        Meta(
            description="Recompute activations in the backward pass to save memory: "
            "full recomputes every block, 2 every second block, selective all but matrix "
            "products, convolutions and attention."
        ),
    ] = "none"
    compile: Annotated[bool, Meta(description="Compile each block with torch.compile.")] = False
    on_bad_numbers: Annotated[
        Literal["skip", "stop"],
        Meta(description="What all ranks do with a step that contains NaN or Inf."),
    ] = "skip"
    log_every: Annotated[Count, Meta(description="Steps between two log lines.")] = 10
    evaluate_every: Annotated[
        Count | None,
        Meta(description="Steps between two evaluations; after each epoch if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When and where checkpoints are saved, and how many are kept."""

    enabled: Annotated[
        bool,
        Meta(description="Save checkpoints during training and at its end; false saves none."),
    ] = True
    every: Annotated[
        Count | Text,
        Meta(description="Interval: a number of steps, or a duration such as 10min or 1h."),
    ] = "10min"
    keep: Annotated[
        Count, Meta(description="Number of checkpoints to keep; older ones are deleted.")
    ] = 3
    folder: Annotated[
        Text | None,
        Meta(
            description="Folder or URL (such as s3://bucket/path) for checkpoints, in a subfolder "
            "named after the run; the run folder if left out."
        ),
    ] = None
    mode: Annotated[
        Literal["auto", "async", "sync"],
        Meta(
            description="async writes while training continues, which needs host memory; "
            "auto uses async if there is enough memory."
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where the metrics of a run go besides the run folder and Prometheus."""

    sinks: Annotated[
        tuple[Literal["tensorboard", "parquet", "mlflow", "wandb"], ...],
        Meta(
            description="Where to send metrics: tensorboard and parquet write files into the run "
            "folder, mlflow and wandb are trackers. A sidecar process of rank 0 sends them."
        ),
    ] = ()
    mlflow_uri: Annotated[
        Text | None,
        Meta(
            description="MLflow tracking URI, such as http://… or sqlite:///…; "
            "MLFLOW_TRACKING_URI in rank 0's environment if left out. Put passwords into the "
            "environment, not here."
        ),
    ] = None
    mlflow_experiment: Annotated[
        Text | None, Meta(description="MLflow experiment; experiment_name if left out.")
    ] = None
    wandb_project: Annotated[
        Text | None, Meta(description="W&B project; experiment_name if left out.")
    ] = None
    wandb_mode: Annotated[
        Literal["offline", "online"],
        Meta(
            description="offline writes files into the run folder, which wandb sync uploads later; "
            "online uploads during the run, with WANDB_API_KEY from rank 0's environment."
        ),
    ] = "offline"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The hosts that the run starts on, and what happens when it fails."""

    hosts: Annotated[
        Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] | None,
        Meta(description="Hosts by their ssh names, rank 0's host first: a, b:4 (4 ranks), c."),
    ] = None
    max_restarts: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Max restarts of the whole run after consecutive failures; each new "
            "checkpoint resets the count. If left out, 3 for muster train, else 0."
        ),
    ] = None
    remote_python: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Python on the other hosts; the same path as here if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    experiment_name: Annotated[
        str, Meta(min_length=1, description="Name of the run folder and of the tracker's run.")
    ] = "experiment"
    distributed: Distributed = field(default_factory=Distributed)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
