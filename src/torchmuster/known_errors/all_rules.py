"""All rules, from the file of each subject; the files are read when the first error is explained."""

import importlib
from functools import cache

from torchmuster.known_errors.rule import Rule

SUBJECTS = (
    "meeting",
    "network",
    "nccl",
    "drivers",
    "cuda",
    "memory",
    "limits",
    "installation",
    "libraries",
    "script",
    "tensors",
    "checkpoints",
    "ssh",
    "slurm",
)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return the rules of all subjects."""
    files = (importlib.import_module(f"torchmuster.known_errors.{name}") for name in SUBJECTS)
    return tuple(rule for file in files for rule in file.RULES)
