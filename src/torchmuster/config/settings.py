"""Every setting: its name, type, limits, default and one line of help.

This file is the single source for the YAML file, the environment variables, the flags, the JSON
Schema and the reference page. A part of the product that needs a setting adds it here.
"""

# ruff: noqa: RUF009  # setting() returns a dataclass field

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Whole: TypeAlias = Annotated[int, Meta(ge=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
GpuId: TypeAlias = Whole | Text
# 90s, 10m or 1.5h; a number means seconds.
Duration: TypeAlias = NotNegative | Text


def setting(default: Any, text: str) -> Any:
    """Declare a setting by its default and its help; the annotation is its type."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How many devices the run uses, which ones, and how the work is split."""

    enabled: bool = setting(
        True,
        "Run one process per device; false means one process on one device.",
    )
    num_gpus: Count | None = setting(None, "Number of GPUs to use; all visible ones if left out.")
    gpu_ids: Annotated[tuple[GpuId, ...], Meta(min_length=1)] | None = setting(
        None,
        "GPUs to use: nvidia-smi indices, UUIDs or unique prefixes of UUIDs.",
    )
    strategy: Literal["auto", "ddp", "fsdp"] = setting(
        "auto",
        "ddp copies the model to each GPU, fsdp shards it; auto decides.",
    )
    fsdp_sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard"] = setting(
        "full_shard",
        "What fsdp shards; only used with strategy fsdp.",
    )
    fsdp_cpu_offload: bool = setting(
        False,
        "Keep fsdp's shards in host memory: slower, but fits larger models.",
    )
    find_unused_parameters: bool = setting(
        False,
        "Allow ddp steps that do not use all parameters; this is slower.",
    )
    master_port: Port | None = setting(None, "TCP port of the rendezvous; a free one if left out.")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model, the dtype of its weights, its loss and its LoRA matrices."""

    model_name_or_path: Text | None = setting(
        None,
        "A model: a local folder, or its name on the Hugging Face hub. Its class follows from "
        "architectures in config.json. A folder with only config.json is built with random "
        "weights.",
    )
    build: Text | None = setting(
        None,
        "Your module:function that returns the model, instead of model_name_or_path.",
    )
    device_map: Literal["auto", "cuda", "cpu"] = setting(
        "auto",
        "Type of device to train on; each rank uses one. auto uses GPUs if there are any.",
    )
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = setting(
        None,
        "dtype of the weights; if left out, float32 for a model given by name, and unchanged "
        "for a model of your own. auto keeps the dtype of the model's files: 16-bit weights "
        "take half the memory, but lose small updates.",
    )
    loss: Text | None = setting(
        None,
        "cross_entropy, language_model, classification, or your module:function; if left out, the loss of the class of a model given by name, else "
        "cross_entropy.",
    )
    lora: dict[str, Any] | None = setting(
        None,
        "Freeze the weights and train LoRA matrices: options of peft.LoraConfig, such as {r: "
        "16, target_modules: all-linear, lora_dropout: 0.05}. If left out, lora_alpha is "
        "twice r, and target_modules are chosen by model type.",
    )
    load_in_4bit: bool = setting(
        False,
        "Load the frozen weights in 4 bits (QLoRA) with bitsandbytes; needs lora.",
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training and evaluation data, and how it is batched."""

    dataset: Text | None = setting(None, "Your module:function that returns a dataset.")
    files: Text | tuple[Text, ...] | None = setting(
        None,
        "JSON lines, text, Parquet or CSV files: a path, a pattern or a URL such as "
        "s3://a/*.jsonl, or a list.",
    )
    hugging_face: Text | None = setting(
        None,
        "A dataset: a local folder, or its name on the Hugging Face hub.",
    )
    images: Text | None = setting(
        None,
        "Folder of images to classify, with one subfolder for each class.",
    )
    options: dict[str, Any] | None = setting(
        None,
        "Options of datasets.load_dataset for files or a Hugging Face dataset, such as {name: "
        "wikitext-2-raw-v1, split: 'train[:1000]', streaming: true}.",
    )
    columns: dict[str, str] | None = setting(
        None,
        "Fields with other names: {text: body}, {messages: chat}, or {prompt: question, "
        "completion: answer}; if left out, the fields of the first record decide what it "
        "holds.",
    )
    tokenizer: Text | None = setting(
        None,
        "bytes, a local folder, or a name on the hub; the tokenizer of model_name_or_path if "
        "left out.",
    )
    sequence_length: Annotated[int, Meta(ge=2)] = setting(1024, "Tokens per row of a batch.")
    pack: bool | None = setting(
        None,
        "Pack several texts into a row, which do not attend to each other; false pads each "
        "text to a row of its own; on if left out, unless a trial shows that the model mixes "
        "the texts of a row. Only text and tokens continue in the next row; chats and "
        "completions are truncated.",
    )
    shuffle: bool = setting(
        True,
        "Shuffle the data in each epoch, based on the seed; a stream of text in blocks of "
        "1,000 records.",
    )
    workers: Whole = setting(
        0,
        "Worker processes per rank that read ahead; 0 reads in the rank itself, as streams do.",
    )
    evaluation: Text | tuple[Text, ...] | None = setting(
        None,
        "What to evaluate on, of the same kind as the training data: files, a split of "
        "data.hugging_face, a folder of images, or your module:function.",
    )


@dataclass(frozen=True, kw_only=True)
class Train:
    """Length of training, batch sizes, optimizer and precision."""

    epochs: Count | None = setting(None, "Number of epochs; 1 if steps is left out.")
    steps: Count | None = setting(None, "Number of optimizer steps, instead of epochs.")
    global_batch_size: Count | None = setting(
        None,
        "Samples per step over all ranks; one micro-batch per rank if left out.",
    )
    micro_batch_size: Count | None = setting(
        None,
        "Samples per forward pass of a rank; 8 unless other settings determine it.",
    )
    optimizer: Text = setting(
        "adamw",
        "adamw, sgd, or module:function of an optimizer, such as torch.optim:Adafactor or "
        "bitsandbytes.optim:AdamW8bit, called with the list of parameter groups. With adamw "
        "the host never waits for the device in a step; with all others it waits once.",
    )
    learning_rate: Positive = setting(0.001, "Peak learning rate.")
    weight_decay: NotNegative = setting(
        0.01,
        "Weight decay of the optimizer, for all parameters except norms and biases.",
    )
    optimizer_options: dict[str, Any] | None = setting(
        None,
        "Other options: betas and eps of adamw, momentum of sgd (0.9 if left out), keyword "
        "arguments of a module:function.",
    )
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = setting(
        "constant",
        "Learning rate after the warm-up, by transformers' names; linear and cosine decay to 0 "
        "at the last step, warmup_stable_decay in the last tenth of the steps.",
    )
    warmup: Whole | Text = setting(
        0,
        "The steps over which the learning rate rises to its peak: a number, or a share of "
        "all steps such as 3%, rounded up.",
    )
    clip_norm: Positive | None = setting(None, "Max gradient norm (L2); off if left out.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto",
        "dtype of the computation; auto picks one that all ranks' GPUs support.",
    )
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = setting(
        0,
        "Seed of the initial weights, the data order and dropout.",
    )
    activation_checkpointing: Literal["none", "full", "selective"] | Count = setting(
        "none",
        "Recompute activations in the backward pass to save memory: full recomputes every "
        "block, 2 every second block, selective all but matrix products, convolutions and "
        "attention.",
    )
    compile: bool = setting(False, "Compile each block with torch.compile.")
    log_every: Count = setting(10, "Steps between two log lines.")
    evaluate_every: Count | None = setting(
        None,
        "Steps between two evaluations; after each epoch if left out.",
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When and where checkpoints are saved, and how many are kept."""

    every: Count | Text = setting(
        "10min",
        "Interval: a number of steps, or a duration such as 10min or 1h; never saves only the "
        "final weights.",
    )
    keep: Count = setting(3, "Number of checkpoints to keep; older ones are deleted.")
    keep_best: bool = setting(
        False,
        "Save a checkpoint whenever the loss of an evaluation improves, and keep the best one "
        "in addition to the newest ones.",
    )
    folder: Text | None = setting(
        None,
        "Folder or URL (such as s3://bucket/path) for checkpoints, in a subfolder named after "
        "the run; the run folder if left out.",
    )


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where the metrics of a run go besides the run folder and Prometheus."""

    sinks: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = setting(
        (),
        "Where to send metrics: tensorboard writes files into the run folder, mlflow and "
        "wandb are trackers. A thread of rank 0 sends them.",
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The hosts that the run starts on, and what happens when it fails."""

    hosts: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = setting(
        None,
        "Hosts by their ssh names, rank 0's host first: a, b:4 (4 ranks), c.",
    )
    max_restarts: Whole | None = setting(
        None,
        "Max restarts of the whole run after consecutive failures; each new checkpoint resets "
        "the count. If left out, 3 for muster train, else 0.",
    )
    remote_python: Text | None = setting(
        None,
        "Python on the other hosts; the same path as here if left out.",
    )
    spares: Whole = setting(
        0,
        "Number of hot spares: the last hosts of the list wait with torch imported, and "
        "replace hosts that fail.",
    )
    address: Text | None = setting(
        None,
        "Rendezvous address of the first host; one that all hosts reach if left out.",
    )
    join_port: Port | None = setting(
        None,
        "With --join, the port on which machines join; a free one if left out.",
    )
    join_timeout: Duration | None = setting(
        None,
        "The run fails if not all hosts have joined by then; 2m if left out, 30m where people "
        "or schedulers start the hosts.",
    )
    lost_after: Duration = setting("10s", "A host is lost after this time without a heartbeat.")
    grace: Duration | None = setting(
        None,
        "Time for ranks to save and exit after SIGTERM, before they are killed; 30s if left "
        "out, or less if Slurm or Kubernetes kills them earlier.",
    )
    end_hangs_after: Duration | None = setting(
        None,
        "Kill the ranks after a hang of this duration, or never. Default: after 1m, but only "
        "if they cannot recover.",
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    experiment_name: Text = setting(
        "experiment",
        "Name of the run folder and of the tracker's run.",
    )
    distributed: Distributed = field(default_factory=Distributed)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
