"""All metrics: the exporter, the alerts and the views use this table.

Names follow Prometheus' rules: subject, quantity, base unit; counters end in ``_total``. A
published name keeps its meaning (``tests/golden``).
"""

from torchmuster.monitor.metric import Level, Metric, Scope

_RUN, _RANK, _DEVICE, _HOST = Scope.RUN, Scope.RANK, Scope.DEVICE, Scope.HOST
_SOMETIMES, _ON_DEVICES = Level.SOMETIMES, Level.DEVICE

# ---- run
RUN_PHASE = Metric(
    "muster_run_phase",
    _RUN,
    "1 for the current phase of the run: submitted, waiting, joining, starting, running, "
    "finished, saved, failed, stopped or died",
    labels=("phase",),
)
RUN_STARTED = Metric("muster_run_start_timestamp_seconds", _RUN, "start time of the run, Unix time")
RUN_RESTARTS = Metric("muster_run_restarts_total", _RUN, "restarts of all ranks after a failure")
RUN_RANKS = Metric("muster_run_ranks", _RUN, "ranks with a recent heartbeat")
RUN_RANKS_STARTED = Metric(
    "muster_run_ranks_started",
    _RUN,
    "largest number of ranks started together since launch",
)

# ---- training
STEPS = Metric(
    "muster_train_steps_total",
    _RUN,
    "optimizer steps so far; steps repeated after a restart count once",
)
EPOCH = Metric("muster_train_epoch", _RUN, "number of completed epochs")
LOSS = Metric(
    "muster_train_loss",
    _RUN,
    "mean loss since the last step line; NaN if it is not finite",
)
LEARNING_RATE = Metric("muster_train_learning_rate", _RUN, "learning rate of the last step")
GRADIENT_NORM = Metric(
    "muster_train_gradient_norm",
    _RUN,
    "gradient norm of the last step, before clipping",
    level=_SOMETIMES,
)
LOSS_SCALE = Metric("muster_train_loss_scale", _RUN, "loss scale (fp16)", level=_SOMETIMES)
SKIPPED_STEPS = Metric(
    "muster_train_skipped_steps_total",
    _RUN,
    "steps skipped because of non-finite gradients",
)
SAMPLES_RATE = Metric(
    "muster_train_samples_per_second",
    _RUN,
    "training throughput of all ranks in samples/s",
)
TOKENS_RATE = Metric(
    "muster_train_tokens_per_second",
    _RUN,
    "training throughput of all ranks in tokens/s (items that the loss counts)",
    level=_SOMETIMES,
)
STEP_TIME = Metric("muster_train_step_seconds", _RUN, "duration of a step")
TIME_SHARE = Metric(
    "muster_train_time_ratio",
    _RUN,
    "share of the ranks' time, 0 to 1: data, compute, communication, checkpoint, evaluation",
    labels=("part",),
)
FLOP_RATE = Metric(
    "muster_train_flop_per_second",
    _RUN,
    "model FLOP/s of all ranks",
    level=_SOMETIMES,
)
MFU = Metric(
    "muster_train_mfu_ratio",
    _RUN,
    "model FLOP/s as a share of the peak FLOP/s of the devices",
    level=_SOMETIMES,
)
STEP_AGE = Metric("muster_train_step_age_seconds", _RUN, "time since the last step line")
MEMORY_PEAK = Metric(
    "muster_train_memory_peak_bytes",
    _RUN,
    "peak memory of any rank since the start",
)
GOODPUT = Metric(
    "muster_train_goodput_ratio",
    _RUN,
    "share of the run's time spent in steps that count: without startup, saving, "
    "evaluation, stalls, skipped and repeated steps",
)
EVALUATION = Metric(
    "muster_train_evaluation",
    _RUN,
    "result of the last evaluation; the label metric has its name",
    labels=("metric",),
    level=_SOMETIMES,
)
CHECKPOINT_AGE = Metric(
    "muster_checkpoint_age_seconds",
    _RUN,
    "age of the newest complete checkpoint; time since the run's start if there is none",
    level=_SOMETIMES,
)
CHECKPOINT_INTERVAL = Metric(
    "muster_checkpoint_interval_seconds",
    _RUN,
    "longest time between two checkpoints since the launch; 1 hour until there are three "
    "checkpoints",
    level=_SOMETIMES,
)
CHECKPOINT_STEP = Metric(
    "muster_checkpoint_step",
    _RUN,
    "step of the newest complete checkpoint",
    level=_SOMETIMES,
)
CHECKPOINT_STALL = Metric(
    "muster_checkpoint_stall_seconds",
    _RUN,
    "how long the last save blocked the training",
    level=_SOMETIMES,
)
SINK_FAILING = Metric(
    "muster_sink_failing_seconds",
    _RUN,
    "how long a sink (tensorboard, mlflow, wandb) has not received the run's metrics; 0 "
    "while it receives them",
    labels=("sink",),
    level=_SOMETIMES,
)

# ---- ranks
RANK_STEP = Metric("muster_rank_step", _RANK, "current step of a rank")
RANK_SILENT = Metric(
    "muster_rank_silent_seconds",
    _RANK,
    "time since the last heartbeat of a rank, that is, since Python last ran in it",
)
RANK_CPUS = Metric(
    "muster_rank_cpus",
    _RANK,
    "CPUs used by a rank and its child processes",
    level=_SOMETIMES,
)
RANK_MEMORY = Metric(
    "muster_rank_memory_bytes",
    _RANK,
    "resident memory (RSS) of a rank's process",
    level=_SOMETIMES,
)
RANK_DATA = Metric(
    "muster_rank_data_ratio",
    _RANK,
    "share of the time that a rank waits for data",
    level=_SOMETIMES,
)
RANK_WAITING = Metric(
    "muster_rank_communication_ratio",
    _RANK,
    "share of the time that a rank waits for communication, that is, for other ranks; the"
    " slowest rank waits least",
    level=_SOMETIMES,
)

# ---- accelerators
GPU_UTILIZATION = Metric(
    "muster_gpu_utilization_ratio",
    _DEVICE,
    "share of the time in which a kernel ran",
    level=_ON_DEVICES,
)
GPU_MEMORY_USED = Metric(
    "muster_gpu_memory_used_bytes",
    _DEVICE,
    "memory in use",
    level=_ON_DEVICES,
)
GPU_MEMORY_USABLE = Metric(
    "muster_gpu_memory_usable_bytes",
    _DEVICE,
    "memory available to programs",
    level=_ON_DEVICES,
)
GPU_TEMPERATURE = Metric(
    "muster_gpu_temperature_celsius",
    _DEVICE,
    "temperature",
    level=_ON_DEVICES,
)
GPU_SLOWDOWN_TEMPERATURE = Metric(
    "muster_gpu_slowdown_temperature_celsius",
    _DEVICE,
    "temperature at which the device starts to throttle",
    level=_ON_DEVICES,
)
GPU_POWER = Metric("muster_gpu_power_watts", _DEVICE, "power drawn", level=_ON_DEVICES)
GPU_POWER_LIMIT = Metric("muster_gpu_power_limit_watts", _DEVICE, "power limit", level=_ON_DEVICES)
GPU_ENERGY = Metric(
    "muster_gpu_energy_joules_total",
    _DEVICE,
    "energy used since the driver was loaded",
    level=_ON_DEVICES,
)
GPU_ECC = Metric(
    "muster_gpu_ecc_errors_total",
    _DEVICE,
    "memory errors since the driver was loaded: kind corrected or uncorrected",
    labels=("kind",),
    level=_ON_DEVICES,
)
GPU_THROTTLED = Metric(
    "muster_gpu_throttled",
    _DEVICE,
    "1 for each current throttle reason",
    labels=("reason",),
    level=_ON_DEVICES,
)

# ---- host
HOST_CPU = Metric("muster_host_cpu_ratio", _HOST, "CPU utilization")
HOST_MEMORY_AVAILABLE = Metric(
    "muster_host_memory_available_bytes",
    _HOST,
    "memory available without swapping",
)
HOST_MEMORY = Metric("muster_host_memory_bytes", _HOST, "total memory")
HOST_DISK_FREE = Metric(
    "muster_host_disk_free_bytes",
    _HOST,
    "free space on the disk of the runs folder",
)
HOST_NETWORK = Metric(
    "muster_host_network_bytes_total",
    _HOST,
    "bytes over all interfaces except loopback: direction received or sent",
    labels=("direction",),
)

# ---- queue
QUEUE_REQUESTS = Metric(
    "muster_queue_requests",
    _HOST,
    "requests that wait for GPUs of this host",
    level=_ON_DEVICES,
)
GPUS_CLAIMED = Metric(
    "muster_gpus_claimed",
    _HOST,
    "GPUs of this host that are claimed",
    level=_ON_DEVICES,
)

# ---- exporter
EXPORTER_SERIES = Metric(
    "muster_exporter_series",
    _HOST,
    "number of series in this response, not counting this one",
)
EXPORTER_TIME = Metric(
    "muster_exporter_collect_seconds",
    _HOST,
    "time to collect the samples of this response",
)

METRICS = (
    RUN_PHASE,
    RUN_STARTED,
    RUN_RESTARTS,
    RUN_RANKS,
    RUN_RANKS_STARTED,
    STEPS,
    EPOCH,
    LOSS,
    LEARNING_RATE,
    GRADIENT_NORM,
    LOSS_SCALE,
    SKIPPED_STEPS,
    SAMPLES_RATE,
    TOKENS_RATE,
    STEP_TIME,
    TIME_SHARE,
    FLOP_RATE,
    MFU,
    STEP_AGE,
    MEMORY_PEAK,
    GOODPUT,
    EVALUATION,
    CHECKPOINT_AGE,
    CHECKPOINT_INTERVAL,
    CHECKPOINT_STEP,
    CHECKPOINT_STALL,
    SINK_FAILING,
    RANK_STEP,
    RANK_SILENT,
    RANK_CPUS,
    RANK_MEMORY,
    RANK_DATA,
    RANK_WAITING,
    GPU_UTILIZATION,
    GPU_MEMORY_USED,
    GPU_MEMORY_USABLE,
    GPU_TEMPERATURE,
    GPU_SLOWDOWN_TEMPERATURE,
    GPU_POWER,
    GPU_POWER_LIMIT,
    GPU_ENERGY,
    GPU_ECC,
    GPU_THROTTLED,
    HOST_CPU,
    HOST_MEMORY_AVAILABLE,
    HOST_MEMORY,
    HOST_DISK_FREE,
    HOST_NETWORK,
    QUEUE_REQUESTS,
    GPUS_CLAIMED,
    EXPORTER_SERIES,
    EXPORTER_TIME,
)
