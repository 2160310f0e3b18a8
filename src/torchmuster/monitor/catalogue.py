"""All metrics: the exporter, the documentation, the alerts and the dashboard use this table.

Names follow Prometheus' rules: subject, quantity, base unit; counters end in ``_total``. A
published name keeps its meaning (``tests/golden``).
"""

from torchmuster.monitor.metric import Level, Metric, MetricKind, Scope

_RUN, _RANK, _DEVICE, _HOST = Scope.RUN, Scope.RANK, Scope.DEVICE, Scope.HOST
_SOMETIMES = Level.SOMETIMES


def _total(
    name: str,
    unit: str,
    text: str,
    scope: Scope,
    *labels: str,
    level: Level = Level.ALWAYS,
) -> Metric:
    return Metric(
        name=name,
        unit=unit,
        help=text,
        scope=scope,
        kind=MetricKind.COUNTER,
        labels=labels,
        level=level,
    )


def _gauge(
    name: str,
    unit: str,
    text: str,
    scope: Scope,
    *labels: str,
    level: Level = Level.ALWAYS,
) -> Metric:
    return Metric(name=name, unit=unit, help=text, scope=scope, labels=labels, level=level)


# ---- run
RUN_PHASE = _gauge(
    "muster_run_phase",
    "",
    "1 for the current phase of the run: submitted, waiting, joining, starting, running, finished, "
    "saved, failed, stopped or died",
    _RUN,
    "phase",
)
RUN_STARTED = _gauge(
    "muster_run_start_timestamp_seconds", "seconds", "start time of the run, Unix time", _RUN
)
RUN_RESTARTS = _total(
    "muster_run_restarts_total", "", "restarts of all ranks after a failure", _RUN
)
RUN_RANKS = _gauge("muster_run_ranks", "", "ranks with a recent heartbeat", _RUN)
RUN_RANKS_STARTED = _gauge(
    "muster_run_ranks_started",
    "",
    "largest number of ranks started together since launch",
    _RUN,
)

# ---- training
STEPS = _total(
    "muster_train_steps_total",
    "",
    "optimizer steps so far; steps repeated after a restart count once",
    _RUN,
)
EPOCH = _gauge("muster_train_epoch", "", "number of completed epochs", _RUN)
LOSS = _gauge(
    "muster_train_loss",
    "",
    "mean loss since the last step line; NaN if it is not finite",
    _RUN,
)
LEARNING_RATE = _gauge("muster_train_learning_rate", "", "learning rate of the last step", _RUN)
GRADIENT_NORM = _gauge(
    "muster_train_gradient_norm",
    "",
    "gradient norm of the last step, before clipping",
    _RUN,
    level=_SOMETIMES,
)
LOSS_SCALE = _gauge("muster_train_loss_scale", "", "loss scale (fp16)", _RUN, level=_SOMETIMES)
SKIPPED_STEPS = _total(
    "muster_train_skipped_steps_total", "", "steps skipped because of non-finite gradients", _RUN
)
SAMPLES_RATE = _gauge(
    "muster_train_samples_per_second", "", "training throughput of all ranks in samples/s", _RUN
)
TOKENS_RATE = _gauge(
    "muster_train_tokens_per_second",
    "",
    "training throughput of all ranks in tokens/s (items that the loss counts)",
    _RUN,
    level=_SOMETIMES,
)
STEP_TIME = _gauge("muster_train_step_seconds", "seconds", "duration of a step", _RUN)
TIME_SHARE = _gauge(
    "muster_train_time_ratio",
    "ratio",
    "share of the ranks' time, 0 to 1: data, compute, communication, checkpoint, evaluation",
    _RUN,
    "part",
)
FLOP_RATE = _gauge(
    "muster_train_flop_per_second",
    "",
    "model FLOP/s of all ranks",
    _RUN,
    level=_SOMETIMES,
)
MFU = _gauge(
    "muster_train_mfu_ratio",
    "ratio",
    "model FLOP/s as a share of the peak FLOP/s of the devices",
    _RUN,
    level=_SOMETIMES,
)
STEP_AGE = _gauge(
    "muster_train_step_age_seconds",
    "seconds",
    "time since the last step line",
    _RUN,
)
MEMORY_PEAK = _gauge(
    "muster_train_memory_peak_bytes",
    "bytes",
    "peak memory of any rank since the start",
    _RUN,
)
GOODPUT = _gauge(
    "muster_train_goodput_ratio",
    "ratio",
    "share of the run's time spent in steps that count: without startup, saving, evaluation, "
    "stalls, skipped and repeated steps",
    _RUN,
)
EVALUATION = _gauge(
    "muster_train_evaluation",
    "",
    "result of the last evaluation; the label metric has its name",
    _RUN,
    "metric",
    level=_SOMETIMES,
)
CHECKPOINT_AGE = _gauge(
    "muster_checkpoint_age_seconds",
    "seconds",
    "age of the newest complete checkpoint; time since the run's start if there is none",
    _RUN,
    level=_SOMETIMES,
)
CHECKPOINT_INTERVAL = _gauge(
    "muster_checkpoint_interval_seconds",
    "seconds",
    "longest time between two checkpoints since the launch; 1 hour until there are three "
    "checkpoints",
    _RUN,
    level=_SOMETIMES,
)
CHECKPOINT_STEP = _gauge(
    "muster_checkpoint_step",
    "",
    "step of the newest complete checkpoint",
    _RUN,
    level=_SOMETIMES,
)
CHECKPOINT_STALL = _gauge(
    "muster_checkpoint_stall_seconds",
    "seconds",
    "how long the last save blocked the training",
    _RUN,
    level=_SOMETIMES,
)

SINK_FAILING = _gauge(
    "muster_sink_failing_seconds",
    "seconds",
    "how long a sink (tensorboard, mlflow, wandb) has not received the run's metrics; 0 "
    "while it receives them",
    _RUN,
    "sink",
    level=_SOMETIMES,
)

# ---- ranks
RANK_STEP = _gauge("muster_rank_step", "", "current step of a rank", _RANK)
RANK_SILENT = _gauge(
    "muster_rank_silent_seconds",
    "seconds",
    "time since the last heartbeat of a rank, that is, since Python last ran in it",
    _RANK,
)
RANK_CPUS = _gauge(
    "muster_rank_cpus",
    "",
    "CPUs used by a rank and its child processes",
    _RANK,
    level=_SOMETIMES,
)
RANK_MEMORY = _gauge(
    "muster_rank_memory_bytes",
    "bytes",
    "resident memory (RSS) of a rank's process",
    _RANK,
    level=_SOMETIMES,
)
RANK_DATA = _gauge(
    "muster_rank_data_ratio",
    "ratio",
    "share of the time that a rank waits for data",
    _RANK,
    level=_SOMETIMES,
)
RANK_WAITING = _gauge(
    "muster_rank_communication_ratio",
    "ratio",
    "share of the time that a rank waits for communication, that is, for other ranks; the slowest "
    "rank waits least",
    _RANK,
    level=_SOMETIMES,
)

# ---- accelerators
GPU_UTILIZATION = _gauge(
    "muster_gpu_utilization_ratio",
    "ratio",
    "share of the time in which a kernel ran",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_MEMORY_USED = _gauge(
    "muster_gpu_memory_used_bytes", "bytes", "memory in use", _DEVICE, level=Level.DEVICE
)
GPU_MEMORY_USABLE = _gauge(
    "muster_gpu_memory_usable_bytes",
    "bytes",
    "memory available to programs",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_TEMPERATURE = _gauge(
    "muster_gpu_temperature_celsius", "celsius", "temperature", _DEVICE, level=Level.DEVICE
)
GPU_SLOWDOWN_TEMPERATURE = _gauge(
    "muster_gpu_slowdown_temperature_celsius",
    "celsius",
    "temperature at which the device starts to throttle",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_POWER = _gauge("muster_gpu_power_watts", "watts", "power drawn", _DEVICE, level=Level.DEVICE)
GPU_POWER_LIMIT = _gauge(
    "muster_gpu_power_limit_watts", "watts", "power limit", _DEVICE, level=Level.DEVICE
)
GPU_ENERGY = _total(
    "muster_gpu_energy_joules_total",
    "joules",
    "energy used since the driver was loaded",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_ECC = _total(
    "muster_gpu_ecc_errors_total",
    "",
    "memory errors since the driver was loaded: kind corrected or uncorrected",
    _DEVICE,
    "kind",
    level=Level.DEVICE,
)
GPU_THROTTLED = _gauge(
    "muster_gpu_throttled",
    "",
    "1 for each current throttle reason",
    _DEVICE,
    "reason",
    level=Level.DEVICE,
)

GPU_XID = _total(
    "muster_gpu_xid_errors_total",
    "",
    "critical errors reported by the driver since the exporter started: xid is NVIDIA's error "
    "number "
    "(0: any other), kind is program if the GPU stays usable, else device",
    _DEVICE,
    "kind",
    "xid",
    level=Level.DEVICE,
)

# ---- host
HOST_CPU = _gauge("muster_host_cpu_ratio", "ratio", "CPU utilization", _HOST)
HOST_MEMORY_AVAILABLE = _gauge(
    "muster_host_memory_available_bytes", "bytes", "memory available without swapping", _HOST
)
HOST_MEMORY = _gauge("muster_host_memory_bytes", "bytes", "total memory", _HOST)
HOST_DISK_FREE = _gauge(
    "muster_host_disk_free_bytes", "bytes", "free space on the disk of the runs folder", _HOST
)
HOST_NETWORK = _total(
    "muster_host_network_bytes_total",
    "bytes",
    "bytes over all interfaces except loopback: direction received or sent",
    _HOST,
    "direction",
)

# ---- queue
QUEUE_REQUESTS = _gauge(
    "muster_queue_requests",
    "",
    "requests that wait for GPUs of this host",
    _HOST,
    level=Level.DEVICE,
)
GPUS_CLAIMED = _gauge(
    "muster_gpus_claimed",
    "",
    "GPUs of this host that are claimed",
    _HOST,
    level=Level.DEVICE,
)

# ---- exporter
EXPORTER_SERIES = _gauge(
    "muster_exporter_series", "", "number of series in this response, not counting this one", _HOST
)
EXPORTER_TIME = _gauge(
    "muster_exporter_collect_seconds",
    "seconds",
    "time to collect the samples of this response",
    _HOST,
)

METRICS: tuple[Metric, ...] = tuple(
    one for one in list(globals().values()) if isinstance(one, Metric)
)
BY_NAME = {one.name: one for one in METRICS}
