"""Profiles that were recorded of real runs are judged again: the cause is named first, and none on a healthy one."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from torchmuster.profile.analysis import Profile
from torchmuster.profile.causes import find_causes
from torchmuster.profile.facts import RankFacts, Trial

RECORDED = sorted((Path(__file__).parents[2] / "recorded_profiles").glob("*.json.gz"))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one file holds."""

    facts: list[RankFacts]
    trials: tuple[Trial, ...]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_the_cause_of_a_recorded_profile_is_named_first(path: Path) -> None:
    name = path.name.partition(".")[0]
    read = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Recorded)
    causes = [
        cause.name
        for cause in find_causes(Profile(read.facts), read.trials)
        if cause.gain is not None
    ]
    if name.startswith("healthy"):
        assert causes == []
    else:
        assert causes[0] == name.replace("_", "-")
