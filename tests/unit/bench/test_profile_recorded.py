"""Profiles that were recorded of real runs are judged again: the cause is named first, and none on a healthy one."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from torchmuster.bench.profile.advice import advise
from torchmuster.bench.profile.analysis import analyse_facts
from torchmuster.bench.profile.changes import ChangeTrial
from torchmuster.bench.profile.recording import RankFacts

RECORDED = sorted((Path(__file__).parents[2] / "recorded_profiles").glob("*.json.gz"))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one file holds."""

    facts: list[RankFacts]
    trials: tuple[ChangeTrial, ...]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_the_cause_of_a_recorded_profile_is_named_first(path: Path) -> None:
    name = path.name.partition(".")[0]
    read = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Recorded)
    causes = [
        one.cause for one in advise(analyse_facts(read.facts), read.trials) if one.gain is not None
    ]
    if name.startswith("healthy"):
        assert causes == []
    else:
        assert causes[0] == name.replace("_", "-")
