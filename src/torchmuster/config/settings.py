"""Every setting: its name, type, limits, default and one line of help.

This file is the single source for the YAML file, the environment variables, the flags, the JSON
Schema and the reference page. A part of the product that needs a setting adds it here.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

GpuId: TypeAlias = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
# 90s, 10m or 1.5h; a number means seconds.
Duration: TypeAlias = Annotated[float, Meta(ge=0)] | Text


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
    loss: Annotated[
        Text | None,
        Meta(
            description="cross_entropy, language_model, masked_language_model, classification, or "
            "your module:function; if left out, the loss of the class of a model given by name, "
            "else cross_entropy."
        ),
    ] = None
    lora: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Freeze the weights and train LoRA matrices: options of peft.LoraConfig, such as "
            "{r: 16, target_modules: all-linear, lora_dropout: 0.05}. If left out, lora_alpha is twice r, "
            "and target_modules are chosen by model type."
        ),
    ] = None
    load_in_4bit: Annotated[
        bool,
        Meta(
            description="Load the frozen weights in 4 bits (QLoRA) with bitsandbytes; needs lora."
        ),
    ] = False


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
            description="JSON lines, text, Parquet or CSV files: a path, a pattern or a URL such as "
            "s3://a/*.jsonl, or a list."
        ),
    ] = None
    hugging_face: Annotated[
        Text | None,
        Meta(description="A dataset: a local folder, or its name on the Hugging Face hub."),
    ] = None
    images: Annotated[
        Text | None,
        Meta(description="Folder of images to classify, with one subfolder for each class."),
    ] = None
    options: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Options of datasets.load_dataset for files or a Hugging Face dataset, such as "
            "{name: wikitext-2-raw-v1, split: 'train[:1000]', streaming: true}."
        ),
    ] = None
    columns: Annotated[
        dict[str, str] | None,
        Meta(
            description="Fields with other names: {text: body}, {messages: chat}, or {prompt: question, "
            "completion: answer}; if left out, the fields of the first record decide what it holds."
        ),
    ] = None
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
        bool | None,
        Meta(
            description="Pack several texts into a row, which do not attend to each other; false "
            "pads each text to a row of its own; on if left out, unless a trial shows that the model "
            "mixes the texts of a row. Only text and tokens continue in the next row; chats and "
            "completions are truncated."
        ),
    ] = None
    shuffle: Annotated[
        bool,
        Meta(
            description="Shuffle the data in each epoch, based on the seed; a stream of text in blocks of 1,000 records."
        ),
    ] = True
    workers: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(
            description="Worker processes per rank that read ahead; 0 reads in the rank itself, as streams do."
        ),
    ] = 0
    evaluation: Annotated[
        Text | tuple[Text, ...] | None,
        Meta(
            description="What to evaluate on, of the same kind as the training data: files, a split of "
            "data.hugging_face, a folder of images, or your module:function."
        ),
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
    optimizer: Annotated[
        Text,
        Meta(
            description="adamw, sgd, or module:function of an optimizer, such as torch.optim:Adafactor or "
            "bitsandbytes.optim:AdamW8bit, called with the list of parameter groups. With adamw the host "
            "never waits for the device in a step; with all others it waits once."
        ),
    ] = "adamw"
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0)], Meta(description="Peak learning rate.")
    ] = 1e-3
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0)],
        Meta(
            description="Weight decay of the optimizer, for all parameters except norms and biases."
        ),
    ] = 0.01
    optimizer_options: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Other options: betas and eps of adamw, momentum of sgd (0.9 if left out), keyword "
            "arguments of a module:function."
        ),
    ] = None
    schedule: Annotated[
        Literal[
            "constant",
            "linear",
            "cosine",
            "inverse_sqrt",
            "warmup_stable_decay",
        ],
        Meta(
            description="Learning rate after the warm-up, by transformers' names; linear and cosine decay to "
            "min_learning_rate at the last step, warmup_stable_decay in the last tenth of the steps."
        ),
    ] = "constant"
    warmup: Annotated[
        Annotated[int, Meta(ge=0)] | Text,
        Meta(
            description="The steps over which the learning rate rises to its peak: a number, or a share "
            "of all steps such as 3%, rounded up."
        ),
    ] = 0
    min_learning_rate: Annotated[
        Annotated[float, Meta(ge=0)], Meta(description="Learning rate at the end of the decay.")
    ] = 0.0
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
    log_every: Annotated[Count, Meta(description="Steps between two log lines.")] = 10
    evaluate_every: Annotated[
        Count | None,
        Meta(description="Steps between two evaluations; after each epoch if left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When and where checkpoints are saved, and how many are kept."""

    every: Annotated[
        Count | Text,
        Meta(
            description="Interval: a number of steps, or a duration such as 10min or 1h; never "
            "saves only the final weights."
        ),
    ] = "10min"
    keep: Annotated[
        Count, Meta(description="Number of checkpoints to keep; older ones are deleted.")
    ] = 3
    keep_best: Annotated[
        bool,
        Meta(
            description="Save a checkpoint whenever the loss of an evaluation improves, and keep the best "
            "one in addition to the newest ones."
        ),
    ] = False
    folder: Annotated[
        Text | None,
        Meta(
            description="Folder or URL (such as s3://bucket/path) for checkpoints, in a subfolder "
            "named after the run; the run folder if left out."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where the metrics of a run go besides the run folder and Prometheus."""

    sinks: Annotated[
        tuple[Literal["tensorboard", "mlflow", "wandb"], ...],
        Meta(
            description="Where to send metrics: tensorboard writes files into the run folder, "
            "mlflow and wandb are trackers. A sidecar process of rank 0 sends them."
        ),
    ] = ()


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
    spares: Annotated[
        int,
        Meta(
            ge=0,
            description="Number of hot spares: the last hosts of the list wait with torch imported, and replace "
            "hosts that fail.",
        ),
    ] = 0
    address: Annotated[
        Text | None,
        Meta(
            description="Rendezvous address of the first host; one that all hosts "
            "reach if left out."
        ),
    ] = None
    join_port: Annotated[
        Port | None,
        Meta(description="With --join, the port on which machines join; a free one if left out."),
    ] = None
    join_timeout: Annotated[
        Duration | None,
        Meta(
            description="The run fails if not all hosts have joined by then; 2m if left out, 30m where "
            "people or schedulers start the hosts."
        ),
    ] = None
    lost_after: Annotated[
        Duration, Meta(description="A host is lost after this time without a heartbeat.")
    ] = "10s"
    grace: Annotated[
        Duration | None,
        Meta(
            description="Time for ranks to save and exit after SIGTERM, before they are killed; 30s if "
            "left out, or less if Slurm or Kubernetes kills them earlier."
        ),
    ] = None
    end_hangs_after: Annotated[
        Duration | None,
        Meta(
            description="Kill the ranks after a hang of this duration, or never. Default: after 1m, but only if they cannot recover."
        ),
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
