"""``muster profile`` on real trainings: what is written down of their steps, and what is said of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster_command import Muster
from torchmuster.cli.output import new_folder
from torchmuster.profile.facts import Change, ProfileRequest, RankFacts
from torchmuster.profile.trials import record_profile

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parents[1] / "slow_scripts"
# Every door that a training goes through, each a known number of times in a step.
TRAINING = """
import sys, time, torch
from torch.utils.data import DataLoader

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, number):
        time.sleep(0.001)
        return torch.full((8,), number / 4096)

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
loader = iter(DataLoader(Samples(), batch_size=4))
for step in range(int(sys.argv[1])):
    for _ in range(2):
        loss = model(next(loader)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), loss.tolist(), float(loss))
    torch.save(model.state_dict(), sys.argv[2])
raise SystemExit(3 if len(sys.argv) > 3 else 0)
"""


def asked(
    folder: Path, *words: str, script: str = TRAINING, **differences: object
) -> ProfileRequest:
    (folder / "train.py").write_text(script)
    into = new_folder(folder / "profile")
    question = ProfileRequest(
        command=(str(folder / "train.py"), *words), folder=str(folder), ranks=1, device="cpu",
        first_step=9, last_step=10, into=str(into),
    )  # fmt: skip
    return replace(question, **differences)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> RankFacts:
    folder = tmp_path_factory.mktemp("profile")
    (one,) = record_profile(asked(folder, "1000000", str(folder / "weights.pt")))
    return one


def test_every_phase_of_a_step_is_seen_without_a_change_of_the_script(facts: RankFacts) -> None:
    assert [step.number for step in facts.steps] == list(range(4, 11))
    assert [step.number for step in facts.steps if step.profiled] == [8, 9, 10]
    for step in facts.steps:
        times = [step.times[phase] for phase in ("backward", "reads", "save")]
        assert times == [2, 3, 1]
        assert step.seconds["data"] >= 2 * 4 * 0.001
        for phase in ("forward", "backward", "optimizer", "save", "reads"):
            assert step.seconds[phase] > 0
        assert sum(step.seconds.values()) + step.own_s("other") == pytest.approx(step.took_s)


def test_what_it_was_that_trained_is_written_down(facts: RankFacts) -> None:
    assert (facts.rank, facts.device, facts.parameter_dtypes) == (0, "cpu", {"float32": 81})
    assert facts.autocast is None
    assert facts.loader is not None
    assert (facts.loader.workers, facts.loader.samples_per_batch) == (0, 4)
    assert facts.trace is not None
    assert facts.trace.steps == 2
    assert facts.notes == ()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "samples", "saved", "unused"),
    [("batch", 8, True, False), ("saves", 4, False, False), ("buckets", 4, True, True)],
)
def test_changes_are_made_in_the_process_and_nowhere_else(
    tmp_path: Path, kind: Any, samples: int, saved: bool, unused: bool
) -> None:
    change = Change(kind=kind, value=1000 if kind == "saves" else 2)
    weights = tmp_path / "weights.pt"
    (rank,) = record_profile(asked(tmp_path, "1000", str(weights), change=change, traces=False))
    assert rank.loader is not None
    assert rank.loader.samples_per_batch == samples
    assert weights.exists() == saved
    assert rank.change_unused == unused
    assert (tmp_path / "train.py").read_text() == TRAINING


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize(
    ("script", "cause"),
    [("straggler_backward.py", "straggler-backward"), ("starved_loader.py", "starved-loader")],
)
def test_the_cause_is_named_first(muster: Muster, tmp_path: Path, script: str, cause: str) -> None:
    result = muster(
        "profile", "--ranks", "2", "--device", "cpu", "--steps", "12:13", "--json",
        str(SCRIPTS / script),
    )  # fmt: skip
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert answer["advice"][0]["cause"] == cause
    names = {path.name for path in Path(answer["folder"]).iterdir()}
    assert {"rank-0.trace.json.gz", "rank-1.trace.json.gz", "report.html"} <= names
