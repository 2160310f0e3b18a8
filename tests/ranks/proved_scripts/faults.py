"""Faults in training scripts, and what ``muster prove`` must report for each of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A script of this folder with one mistake."""

    script: str
    fault: str  # the value of --fault
    expected: tuple[str, str]  # the property that does not hold, and the first difference
    arguments: tuple[str, ...] = ()  # of the script, besides --fault
    flags: tuple[str, ...] = ()  # of muster prove, besides --steps


ACCUMULATED = ("--batch-size", "2", "--accumulate", "2")
BATCH_NORM = ("--batch-norm",)
DROPOUT = ("--dropout", "0.3")
SAVE_5 = ("--save-every", "5")  # step-5 comes after step-10 in the alphabet
BATCH = ("--ranks", "1,2", "--batch-arg", "--batch-size")
ACCUMULATION = ("--batch-arg", "--batch-size", "--accumulation-arg", "--accumulate")
RESUME = ("--resume-with", "--resume")
HF_RESUME = ("--resume-with", "--resume_from_checkpoint last")
LIGHTNING_RESUME = ("--resume-with", "--ckpt_path last")

PLAIN = "plain.py"
ACCELERATE = "with_accelerate.py"
HF = "with_hf_trainer.py"
LIGHTNING = "with_lightning.py"
FABRIC = "with_fabric.py"

FAULTS = [
    # Two runs of the same command differ.
    Fault(PLAIN, "clock-seed", ("determinism", "weights")),
    Fault(PLAIN, "unordered-files", ("determinism", "data-order")),
    Fault(PLAIN, "unseeded-dropout", ("determinism", "rng"), DROPOUT),
    Fault(PLAIN, "unseeded-noise", ("determinism", "computation")),
    Fault(LIGHTNING, "random-seed", ("determinism", "weights")),
    # A resumed run differs from one that was not interrupted.
    Fault(PLAIN, "resume-ignored", ("resume", "started-from-zero"), (), RESUME),
    Fault(ACCELERATE, "resume-ignored", ("resume", "started-from-zero"), (), RESUME),
    Fault(HF, "resume-ignored", ("resume", "started-from-zero"), (), HF_RESUME),
    Fault(LIGHTNING, "resume-ignored", ("resume", "started-from-zero"), (), LIGHTNING_RESUME),
    Fault(PLAIN, "oldest-checkpoint", ("resume", "older-checkpoint")),
    Fault(PLAIN, "alphabetical-checkpoint", ("resume", "older-checkpoint"), SAVE_5),
    Fault(ACCELERATE, "alphabetical-checkpoint", ("resume", "older-checkpoint"), SAVE_5),
    Fault(HF, "alphabetical-checkpoint", ("resume", "older-checkpoint"), SAVE_5, HF_RESUME),
    Fault(PLAIN, "torn-save", ("resume", "torn-checkpoint")),
    Fault(PLAIN, "renamed-key", ("resume", "resume-failed")),
    Fault(LIGHTNING, "save-weights-only", ("resume", "resume-failed"), (), LIGHTNING_RESUME),
    Fault(PLAIN, "wrapped-keys", ("resume", "weights")),
    Fault(PLAIN, "buffers-lost", ("resume", "buffers"), BATCH_NORM),
    Fault(PLAIN, "ema-lost", ("resume", "weight-copy"), ("--ema", "module")),
    Fault(PLAIN, "ema-lost", ("resume", "weight-copy"), ("--ema", "dict")),
    Fault(ACCELERATE, "ema-not-registered", ("resume", "weight-copy"), ("--ema",)),
    Fault(HF, "ema-not-saved", ("resume", "weight-copy"), ("--ema",), HF_RESUME),
    Fault(LIGHTNING, "ema-without-state", ("resume", "weight-copy"), ("--ema",), LIGHTNING_RESUME),
    Fault(PLAIN, "optimizer-lost", ("resume", "optimizer-state")),
    Fault(FABRIC, "optimizer-lost", ("resume", "optimizer-state")),
    Fault(HF, "save-only-model", ("resume", "optimizer-state"), (), HF_RESUME),
    Fault(PLAIN, "scaler-lost", ("resume", "loss-scale"), ("--scaler",)),
    Fault(PLAIN, "scheduler-lost", ("resume", "learning-rate")),
    Fault(PLAIN, "scheduler-stepped-twice", ("resume", "learning-rate")),
    Fault(ACCELERATE, "scheduler-not-prepared", ("resume", "learning-rate")),
    Fault(PLAIN, "rng-lost", ("resume", "rng"), DROPOUT),
    Fault(FABRIC, "rng-lost", ("resume", "rng"), DROPOUT),
    Fault(LIGHTNING, "rng-lost", ("resume", "rng"), DROPOUT, LIGHTNING_RESUME),
    Fault(PLAIN, "loader-lost", ("resume", "data-order"), ("--shuffle", "loader")),
    Fault(PLAIN, "epoch-restarted", ("resume", "data-order")),
    Fault(ACCELERATE, "no-skip", ("resume", "data-order")),
    Fault(HF, "ignore-data-skip", ("resume", "data-order"), (), HF_RESUME),
    Fault(LIGHTNING, "mid-epoch-save", ("resume", "data-order"), (), LIGHTNING_RESUME),
    Fault(FABRIC, "library-sampler", ("resume", "data-order")),
    Fault(PLAIN, "save-between-micro-batches", ("resume", "accumulation"), ACCUMULATED),
    # Needs a stop by SIGTERM between two micro-batches.
    Fault(PLAIN, "sigterm-drops-gradients", ("resume", "accumulation"), ACCUMULATED),
    # Ranks do not train one model on all data.
    Fault(PLAIN, "same-data", ("ranks", "same-data")),
    Fault(ACCELERATE, "loader-not-prepared", ("ranks", "same-data")),
    Fault(HF, "own-loader", ("ranks", "same-data")),
    Fault(LIGHTNING, "no-distributed-sampler", ("ranks", "same-data")),
    Fault(FABRIC, "loader-not-set-up", ("ranks", "same-data")),
    Fault(PLAIN, "no-set-epoch", ("ranks", "epoch-order")),
    Fault(PLAIN, "equal-worker-seeds", ("ranks", "worker-seeds"), ("--augment", "--workers", "2")),
    Fault(PLAIN, "dropped-batch", ("ranks", "uneven-batches"), ("--samples", "60")),
    Fault(PLAIN, "unsynced-parameter", ("ranks", "replicas-differ"), ("--own-all-reduce",)),
    Fault(PLAIN, "seed-per-rank", ("ranks", "replicas-differ"), ("--own-all-reduce",)),
    Fault(FABRIC, "model-not-set-up", ("ranks", "replicas-differ")),
    Fault(PLAIN, "buffers-not-broadcast", ("ranks", "buffers-differ"), BATCH_NORM),
    Fault(HF, "buffers-not-broadcast", ("ranks", "buffers-differ"), BATCH_NORM),
    Fault(PLAIN, "gradients-summed", ("ranks", "gradient-scale"), ("--own-all-reduce",), BATCH),
    Fault(PLAIN, "mean-of-means", ("ranks", "loss-average"), ("--ignored-labels",), BATCH),
    Fault(PLAIN, "accumulation-not-divided", ("ranks", "accumulation-scale"), (), ACCUMULATION),
    Fault(ACCELERATE, "plain-backward", ("ranks", "accumulation-scale"), (), ACCUMULATION),
    Fault(HF, "own-training-step", ("ranks", "accumulation-scale"), (), ACCUMULATION),
    Fault(FABRIC, "not-divided", ("ranks", "accumulation-scale"), (), ACCUMULATION),
]
