"""Profiles that were recorded of real runs are judged again: the cause is named, and none on a healthy one."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from torchmuster.profile.analysis import Profile
from torchmuster.profile.causes import find_causes, with_trials
from torchmuster.profile.facts import Change, RankFacts

RECORDED = sorted((Path(__file__).parents[2] / "recorded_profiles").glob("*.json.gz"))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What ``--verify`` measured of one change."""

    change: Change
    gain: float


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one file holds."""

    facts: list[RankFacts]
    tried: tuple[Tried, ...]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.partition(".")[0])
def test_the_cause_of_a_recorded_profile_is_named(path: Path) -> None:
    name = path.name.partition(".")[0].replace("_", "-")
    read = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Recorded)
    causes = find_causes(Profile(read.facts))
    gains = {tried.change.kind: tried.gain for tried in read.tried}
    verified = with_trials(
        causes,
        {
            cause.change: gains[cause.change.kind]
            for cause in causes
            if cause.change is not None and cause.change.kind in gains
        },
    )
    accused = [cause.name for cause in causes if cause.is_accused]
    if name.startswith("healthy"):
        assert accused == []
        assert not [cause.name for cause in verified if cause.is_accused]
    else:
        assert verified[0].name == name
        assert verified[0].is_accused
        assert name in [cause.name for cause in causes]  # by the facts, if only as a note
