"""All metrics: the exporter, the alerts and the views use this table.

Names follow Prometheus' rules: subject, quantity, base unit; counters end in ``_total``. A
published name keeps its meaning (``tests/golden``).
"""

from torchmuster.monitor.metric import Metric, Scope

_RUN, _RANK, _DEVICE, _HOST = Scope.RUN, Scope.RANK, Scope.DEVICE, Scope.HOST

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
)
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
)
STEP_TIME = Metric("muster_train_step_seconds", _RUN, "duration of a step")
TIME_SHARE = Metric(
    "muster_train_time_ratio",
    _RUN,
    "share of the ranks' time, 0 to 1: data, compute, communication, checkpoint, evaluation",
    labels=("part",),
)
MFU = Metric(
    "muster_train_mfu_ratio",
    _RUN,
    "model FLOP/s as a share of the peak FLOP/s of the devices",
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
)
CHECKPOINT_AGE = Metric(
    "muster_checkpoint_age_seconds",
    _RUN,
    "age of the newest complete checkpoint; time since the run's start if there is none",
)
CHECKPOINT_STEP = Metric(
    "muster_checkpoint_step",
    _RUN,
    "step of the newest complete checkpoint",
)
CHECKPOINT_STALL = Metric(
    "muster_checkpoint_stall_seconds",
    _RUN,
    "how long the last save blocked the training",
)

# ---- ranks
RANK_STEP = Metric("muster_rank_step", _RANK, "current step of a rank")
RANK_SILENT = Metric(
    "muster_rank_silent_seconds",
    _RANK,
    "time since the last heartbeat of a rank, that is, since Python last ran in it",
)
RANK_MEMORY = Metric(
    "muster_rank_memory_bytes",
    _RANK,
    "resident memory (RSS) of a rank's process",
)
RANK_DATA = Metric(
    "muster_rank_data_ratio",
    _RANK,
    "share of the time that a rank waits for data",
)
RANK_WAITING = Metric(
    "muster_rank_communication_ratio",
    _RANK,
    "share of the time that a rank waits for communication, that is, for other ranks; the"
    " slowest rank waits least",
)

# ---- accelerators
GPU_UTILIZATION = Metric(
    "muster_gpu_utilization_ratio",
    _DEVICE,
    "share of the time in which a kernel ran",
)
GPU_MEMORY_USED = Metric(
    "muster_gpu_memory_used_bytes",
    _DEVICE,
    "memory in use",
)
GPU_MEMORY_USABLE = Metric(
    "muster_gpu_memory_usable_bytes",
    _DEVICE,
    "memory available to programs",
)
GPU_TEMPERATURE = Metric(
    "muster_gpu_temperature_celsius",
    _DEVICE,
    "temperature",
)
GPU_SLOWDOWN_TEMPERATURE = Metric(
    "muster_gpu_slowdown_temperature_celsius",
    _DEVICE,
    "temperature at which the device starts to throttle",
)
GPU_POWER = Metric("muster_gpu_power_watts", _DEVICE, "power drawn")
GPU_ENERGY = Metric(
    "muster_gpu_energy_joules_total",
    _DEVICE,
    "energy used since the driver was loaded",
)
GPU_ECC = Metric(
    "muster_gpu_ecc_errors_total",
    _DEVICE,
    "memory errors since the driver was loaded: kind corrected or uncorrected",
    labels=("kind",),
)
GPU_THROTTLED = Metric(
    "muster_gpu_throttled",
    _DEVICE,
    "1 for each current throttle reason",
    labels=("reason",),
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
)
GPUS_CLAIMED = Metric(
    "muster_gpus_claimed",
    _HOST,
    "GPUs of this host that are claimed",
)

# Every metric of this module, in its order.
METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
