"""Every metric of the product, once: the exporter, the documentation, the alerts and the dashboard use this table.

Names follow Prometheus' rules: what it is about, what it is, its base unit; counters end in ``_total``. A name that
was published keeps its meaning (``tests/golden``).
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


# ---- the run
RUN_PHASE = _gauge(
    "muster_run_phase",
    "",
    "1 for the phase that the run is in: submitted, joining, starting, running, finished, saved, failed, stopped or died",
    _RUN,
    "phase",
)
RUN_STARTED = _gauge(
    "muster_run_start_timestamp_seconds", "seconds", "when the run was started, in Unix time", _RUN
)
RUN_RESTARTS = _total(
    "muster_run_restarts_total", "", "how often all ranks were started again after a failure", _RUN
)
RUN_RANKS = _gauge("muster_run_ranks", "", "how many ranks were seen", _RUN)
RUN_RANKS_STARTED = _gauge(
    "muster_run_ranks_started",
    "",
    "the most ranks that were started together since the run was launched",
    _RUN,
)

# ---- its training
STEPS = _total(
    "muster_train_steps_total",
    "",
    "optimiser steps so far; those that are made again after a restart count once",
    _RUN,
)
EPOCH = _gauge("muster_train_epoch", "", "how often the data has been gone through", _RUN)
LOSS = _gauge(
    "muster_train_loss",
    "",
    "the mean loss since the last line; NaN where it is not a finite number",
    _RUN,
)
LEARNING_RATE = _gauge("muster_train_learning_rate", "", "the learning rate of the last step", _RUN)
GRADIENT_NORM = _gauge(
    "muster_train_gradient_norm",
    "",
    "the norm of the last step's gradients before they were clipped",
    _RUN,
    level=_SOMETIMES,
)
LOSS_SCALE = _gauge(
    "muster_train_loss_scale", "", "what fp16 losses are multiplied by", _RUN, level=_SOMETIMES
)
SKIPPED_STEPS = _total(
    "muster_train_skipped_steps_total", "", "steps whose gradients were not finite, left out", _RUN
)
SAMPLES_RATE = _gauge(
    "muster_train_samples_per_second", "", "samples that all ranks train on in a second", _RUN
)
TOKENS_RATE = _gauge(
    "muster_train_tokens_per_second",
    "",
    "what the loss counts (tokens) that all ranks train on in a second",
    _RUN,
    level=_SOMETIMES,
)
STEP_TIME = _gauge("muster_train_step_seconds", "seconds", "how long a step takes", _RUN)
TIME_SHARE = _gauge(
    "muster_train_time_ratio",
    "ratio",
    "shares of the ranks' time, between 0 and 1: data, compute, communication, checkpoint, evaluation",
    _RUN,
    "part",
)
FLOP_RATE = _gauge(
    "muster_train_flop_per_second",
    "",
    "arithmetic of the model that all ranks do in a second",
    _RUN,
    level=_SOMETIMES,
)
MFU = _gauge(
    "muster_train_mfu_ratio",
    "ratio",
    "the model's arithmetic as a share of what the devices could do at most",
    _RUN,
    level=_SOMETIMES,
)
STEP_AGE = _gauge(
    "muster_train_step_age_seconds",
    "seconds",
    "how long ago the last line about steps was written",
    _RUN,
)
MEMORY_PEAK = _gauge(
    "muster_train_memory_peak_bytes",
    "bytes",
    "the most memory that any rank has used since the start",
    _RUN,
)
GOODPUT = _gauge(
    "muster_train_goodput_ratio",
    "ratio",
    "the share of the run's time that went into steps that count: not into starting, saving, evaluating, standing still, "
    "skipped steps or steps that are made again",
    _RUN,
)
EVALUATION = _gauge(
    "muster_train_evaluation",
    "",
    "what the last evaluation gave; metric is the name that the evaluation gives it",
    _RUN,
    "metric",
    level=_SOMETIMES,
)
CHECKPOINT_AGE = _gauge(
    "muster_checkpoint_age_seconds",
    "seconds",
    "how long ago the newest complete checkpoint was made; since the run's start while there is none",
    _RUN,
    level=_SOMETIMES,
)
CHECKPOINT_STEP = _gauge(
    "muster_checkpoint_step",
    "",
    "the step of the newest complete checkpoint",
    _RUN,
    level=_SOMETIMES,
)
CHECKPOINT_STALL = _gauge(
    "muster_checkpoint_stall_seconds",
    "seconds",
    "how long the training stood still for the last save",
    _RUN,
    level=_SOMETIMES,
)

SINK_FAILING = _gauge(
    "muster_sink_failing_seconds",
    "seconds",
    "for how long a sink (tensorboard, parquet, mlflow, wandb) does not get the run's numbers; 0 while it does",
    _RUN,
    "sink",
    level=_SOMETIMES,
)

# ---- its ranks
RANK_STEP = _gauge("muster_rank_step", "", "the step that a rank is at", _RANK)
RANK_SILENT = _gauge(
    "muster_rank_silent_seconds",
    "seconds",
    "for how long Python could not run in a rank",
    _RANK,
)
RANK_CPUS = _gauge(
    "muster_rank_cpus",
    "",
    "processors that a rank and its children keep busy",
    _RANK,
    level=_SOMETIMES,
)
RANK_MEMORY = _gauge(
    "muster_rank_memory_bytes",
    "bytes",
    "memory of a rank's process in RAM",
    _RANK,
    level=_SOMETIMES,
)
RANK_DATA = _gauge(
    "muster_rank_data_ratio",
    "ratio",
    "the share of its time that a rank waits for data",
    _RANK,
    level=_SOMETIMES,
)
RANK_WAITING = _gauge(
    "muster_rank_communication_ratio",
    "ratio",
    "the share of its time that a rank waits for communication, so for others; the slowest rank waits least",
    _RANK,
    level=_SOMETIMES,
)

# ---- accelerators
GPU_UTILISATION = _gauge(
    "muster_gpu_utilization_ratio",
    "ratio",
    "the share of the time in which some kernel ran",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_MEMORY_USED = _gauge(
    "muster_gpu_memory_used_bytes", "bytes", "memory in use", _DEVICE, level=Level.DEVICE
)
GPU_MEMORY_USABLE = _gauge(
    "muster_gpu_memory_usable_bytes",
    "bytes",
    "memory that programs can have at most",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_TEMPERATURE = _gauge(
    "muster_gpu_temperature_celsius", "celsius", "temperature", _DEVICE, level=Level.DEVICE
)
GPU_SLOWDOWN_TEMPERATURE = _gauge(
    "muster_gpu_slowdown_temperature_celsius",
    "celsius",
    "the temperature from which on the device slows itself down",
    _DEVICE,
    level=Level.DEVICE,
)
GPU_POWER = _gauge("muster_gpu_power_watts", "watts", "power drawn", _DEVICE, level=Level.DEVICE)
GPU_POWER_LIMIT = _gauge(
    "muster_gpu_power_limit_watts", "watts", "power that may be drawn", _DEVICE, level=Level.DEVICE
)
GPU_ENERGY = _total(
    "muster_gpu_energy_joules_total",
    "joules",
    "energy drawn since the driver was loaded",
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
    "1 for each reason for which the device slows itself down now",
    _DEVICE,
    "reason",
    level=Level.DEVICE,
)

GPU_XID = _total(
    "muster_gpu_xid_errors_total",
    "",
    "critical errors that the driver has reported since the exporter began: xid is NVIDIA's number of the error "
    "(0: one of many others), kind is program if the card is well after it, else device",
    _DEVICE,
    "kind",
    "xid",
    level=Level.DEVICE,
)

# ---- the machine
HOST_CPU = _gauge(
    "muster_host_cpu_ratio", "ratio", "the share of its processors' time that is used", _HOST
)
HOST_MEMORY_AVAILABLE = _gauge(
    "muster_host_memory_available_bytes", "bytes", "memory that can be had without swapping", _HOST
)
HOST_MEMORY = _gauge("muster_host_memory_bytes", "bytes", "memory in all", _HOST)
HOST_DISK_FREE = _gauge(
    "muster_host_disk_free_bytes", "bytes", "room on the disk of the runs' folder", _HOST
)
HOST_NETWORK = _total(
    "muster_host_network_bytes_total",
    "bytes",
    "bytes over all interfaces but loopback: direction received or sent",
    _HOST,
    "direction",
)

# ---- the exporter itself
EXPORTER_SERIES = _gauge(
    "muster_exporter_series", "", "series in this answer, besides this one", _HOST
)
EXPORTER_TIME = _gauge(
    "muster_exporter_collect_seconds", "seconds", "how long it took to collect them", _HOST
)

METRICS: tuple[Metric, ...] = tuple(
    one for one in list(globals().values()) if isinstance(one, Metric)
)
BY_NAME = {one.name: one for one in METRICS}
