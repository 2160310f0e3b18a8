"""Training scripts without faults, for which ``muster prove`` must report nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Healthy:
    """A script and how it resumes."""

    script: str  # relative to this folder
    resume_with: str | None = (
        ""  # arguments; "": it resumes by itself; None: it has no way to resume
    )
    arguments: tuple[str, ...] = ()  # of the script
    flags: tuple[str, ...] = ()  # of muster prove, besides --steps and --resume-with
    steps: int = 20


ACCUMULATED = ("--batch-size", "2", "--accumulate", "2")
BATCH = ("--ranks", "1,2,4", "--batch-arg", "--batch-size")
BOTH = (*BATCH, "--accumulation-arg", "--accumulate")
LIBRARIES = "../library_scripts"
EXAMPLES = "../../../examples"
# The newest complete checkpoint: the Trainer writes its files one by one into the folder that "last" would take.
HF = "--resume_from_checkpoint {path}"
NOT_ATOMIC = ("--allow", "torn-checkpoint")
LIGHTNING = "--ckpt_path last"

HEALTHY = [
    Healthy("plain.py", flags=BOTH),
    Healthy("plain.py", "--resume"),
    Healthy("plain.py", arguments=ACCUMULATED),
    Healthy("plain.py", arguments=(*ACCUMULATED, "--samples", "60", "--ignored-labels")),
    Healthy("plain.py", arguments=("--samples", "60", "--ignored-labels"), flags=BOTH),
    Healthy("plain.py", arguments=("--dropout", "0.3")),
    Healthy("plain.py", arguments=("--batch-norm",)),  # the buffers of ranks differ until a forward
    Healthy("plain.py", arguments=("--ema", "module", "--batch-norm")),
    Healthy("plain.py", arguments=("--ema", "dict")),
    Healthy("plain.py", arguments=("--augment", "--workers", "2")),
    Healthy("plain.py", arguments=("--scaler", "--dropout", "0.1")),
    Healthy("plain.py", arguments=("--shuffle", "loader", "--augment", "--workers", "2")),
    Healthy("plain.py", arguments=("--own-all-reduce",), flags=BATCH),
    Healthy("with_accelerate.py", flags=BOTH),
    Healthy("with_accelerate.py", "--resume", ACCUMULATED),
    Healthy("with_accelerate.py", arguments=("--dropout", "0.3", "--ema")),
    Healthy("with_hf_trainer.py", HF, flags=BOTH),
    Healthy("with_hf_trainer.py", HF, ACCUMULATED),
    Healthy("with_hf_trainer.py", HF, ("--dropout", "0.3", "--batch-norm", "--ema")),
    Healthy("with_lightning.py", LIGHTNING, flags=BOTH),
    Healthy("with_lightning.py", LIGHTNING, ACCUMULATED),
    Healthy("with_lightning.py", LIGHTNING, ("--dropout", "0.3", "--batch-norm", "--ema")),
    Healthy("with_fabric.py", flags=BOTH),
    Healthy("with_fabric.py", "--resume", ACCUMULATED),
    Healthy("with_fabric.py", arguments=("--dropout", "0.3", "--batch-norm")),
    Healthy("two_optimizers.py"),
    # After the libraries' own examples.
    Healthy("accelerate_nlp_example.py", HF),
    Healthy("hf_run_clm.py", flags=NOT_ATOMIC),
    Healthy("trl_sft.py", "--resume", flags=NOT_ATOMIC),
    Healthy("lightning_autoencoder.py", LIGHTNING, flags=BATCH),
    Healthy("lightning_boring.py", None),
    Healthy("fabric_image_classifier.py", None),
    # Scripts of other tests.
    Healthy(f"{LIBRARIES}/accelerate_loop.py", None, steps=12),  # the same order in each epoch
    Healthy(f"{LIBRARIES}/hf_trainer.py", None, steps=10),
    Healthy(f"{LIBRARIES}/lightning_trainer.py", None, steps=12),  # the same order in each epoch
    Healthy(f"{LIBRARIES}/trl_sft.py", None, steps=5),
    Healthy(f"{EXAMPLES}/train_ddp.py", "", ("--samples", "512", "--batch-size", "32"), BATCH),
    Healthy(f"{EXAMPLES}/image_classifier_own_loop.py", None),
    Healthy(f"{EXAMPLES}/language_model_own_loop.py", None),
]
