"""Packs what a profile recorded into a file that tests can judge again: facts and trials, without traces.

python benchmarks/profile_recorded.py profile/2026-11-16-030232 straggler_backward
"""

import dataclasses
import gzip
import sys
from pathlib import Path

import msgspec

from torchmuster.bench.profile.changes import read_trials
from torchmuster.bench.profile.recording import read_facts

PLACE = Path(__file__).parent.parent / "tests" / "recorded_profiles"


def pack(folder: Path, name: str) -> Path:
    """Write what a profile's folder holds as one small file; return where it is."""
    facts = [
        dataclasses.replace(
            one,
            host="vm",
            trace=None,
            steps=tuple(dataclasses.replace(step, collectives=()) for step in one.steps),
        )
        for one in read_facts(folder)
    ]
    trials, _ = read_trials(folder)
    text = msgspec.json.encode({"facts": facts, "trials": trials})
    path = PLACE / f"{name}.json.gz"
    path.write_bytes(gzip.compress(text, mtime=0))
    return path


if __name__ == "__main__":
    print(pack(Path(sys.argv[1]), sys.argv[2]))
