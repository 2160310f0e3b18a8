"""Iterable datasets of Hugging Face, from local files, offline."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from made_up_worlds import made_up_world
from rank_programs.streaming import Batches, together
from rank_programs.streaming import given as given_out
from ranks_in_lockstep import run_in_lockstep
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.streams.iterable import HuggingFaceStream
from torchmuster.train.world import World

pytestmark = [pytest.mark.engine, pytest.mark.integrations]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A streamed dataset of three files with 50 records."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would stay
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    numbers = itertools.count()
    for name, count in {"a": 20, "b": 7, "c": 23}.items():
        lines = [json.dumps({"n": next(numbers), "text": "a"}) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "*.jsonl"),
        split="train",
        streaming=True,
        cache_dir=str(tmp_path / "cache"),
    )


def loader(dataset: Any, world: World, **arguments: Any) -> StreamLoader:
    return StreamLoader(
        HuggingFaceStream(dataset, lanes=6),
        world,
        global_batch_size=8,
        block=2,
        collate=numbers,
        **arguments,
    )


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [one["n"] for one in samples]


@pytest.mark.parametrize("change", ["as it is", "mapped", "shuffled in a buffer"])
def test_each_record_once_on_any_number_of_ranks_and_after_a_return(
    dataset: Any, change: str
) -> None:
    if change == "mapped":
        dataset = dataset.map(lambda one: {"n": one["n"]}).filter(lambda one: one["n"] != 9)
    elif change == "shuffled in a buffer":
        dataset = dataset.shuffle(seed=3, buffer_size=10)
    # A buffer's content is lost with its state, so such a dataset is read from the beginning instead.
    part = HuggingFaceStream(dataset)._open(0, epoch=0, state=None)
    assert hasattr(part, "state_dict") == (change != "shuffled in a buffer")
    expected = [one for one in range(50) if change != "mapped" or one != 9]
    alone = together([given_out(loader(dataset, made_up_world()).epoch(0))])
    assert sorted(itertools.chain(*alone)) == expected
    another = together([given_out(loader(dataset, made_up_world()).epoch(1))])
    assert sorted(itertools.chain(*another)) == expected
    assert another != alone
    for stop in (0, 2, 5, len(alone)):
        first = loader(dataset, made_up_world())
        list(itertools.islice(first.epoch(0), stop))
        state = json.loads(json.dumps(first.state()))

        def go_on(world: World, state: dict[str, Any] = state) -> Batches:
            restored = loader(dataset, world)
            restored.restore(state)
            return given_out(restored.epoch(0))

        assert together(run_in_lockstep(2, go_on)) == alone[stop:], stop


def test_workers_do_not_divide_it_a_second_time(dataset: Any) -> None:
    alone = together([given_out(loader(dataset, made_up_world()).epoch(0))])
    assert together([given_out(loader(dataset, made_up_world(), workers=2).epoch(0))]) == alone
