import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchmuster.errors import MusterError
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.streams.files import Files
from torchmuster.train.data.streams.iterable import Iterables
from torchmuster.train.data.streams.packing import PackedRows
from torchmuster.train.data.streams.reading import Source
from torchmuster.train.data.streams.tokenizing import ByteTokenizer, Tokenized
from torchmuster.train.world import World

Batches = list[tuple[int, int | None, list[list[Any]]]]  # (number, samples, own micro-batches)


def given(steps: Iterable[Any]) -> Batches:
    """Read steps as plain values; idle micro-batches are empty."""
    return [
        (step.number, step.samples, [list(one.batch) if one.samples else [] for one in step])
        for step in steps
    ]


def together(answers: list[Batches]) -> list[list[Any]]:
    """Return the sorted samples of each step over all ranks; asserts what must be equal everywhere."""
    result = []
    for steps in zip(*answers, strict=True):
        assert len({(number, samples, len(micros)) for number, samples, micros in steps}) == 1
        samples = sorted(one for _, _, micros in steps for micro in micros for one in micro)
        assert len(samples) == steps[0][1]
        result.append(samples)
    return result


def source_named(name: str, place: str) -> Source:
    sources: dict[str, Callable[[], Source]] = {
        "numbers": lambda: Iterables(range(203), lanes=5),
        "files": lambda: Files(f"{place}/*.txt", lanes=12),
        "packed": lambda: PackedRows(
            Tokenized(Files(f"{place}/*.txt", lanes=6), ByteTokenizer()),
            sequence_length=24,
            end=ByteTokenizer.end,
        ),
    }
    return sources[name]()


def _loader(world: World, source: Source, **arguments: Any) -> StreamLoader:
    arguments = {"global_batch_size": 12, "micro_batch_size": 3, "block": 4, **arguments}
    return StreamLoader(source, world, collate=as_values, **arguments)


def as_values(samples: list[Any]) -> list[Any]:
    return [tuple(one["input_ids"].tolist()) if isinstance(one, dict) else one for one in samples]


def read(
    world: World, place: str, wanted: list[tuple[str, dict[str, Any], list[int]]]
) -> list[tuple[Batches, Batches, list[Batches]]]:
    """For each source: two whole epochs, and what follows after each of some numbers of steps."""
    # Ranks of these tests come from a fork server; their workers would each wait for one of their own.
    multiprocessing.set_start_method("fork", force=True)
    result = []
    for name, arguments, stops in wanted:
        source = source_named(name, place)
        whole = _loader(world, source, **arguments)
        epochs = given(whole.epoch(0)), given(whole.epoch(1))
        result.append((*epochs, [_rest(world, source, stop, arguments) for stop in stops]))
    return result


def _rest(world: World, source: Source, stop: int, arguments: dict[str, Any]) -> Batches:
    state = state_after(world, source, stop, **arguments)
    restored = _loader(world, source, **arguments)
    restored.restore(state)
    return given(restored.epoch(0))


def state_after(world: World, source: Source, steps: int, **arguments: Any) -> dict[str, Any]:
    loader = _loader(world, source, **arguments)
    reading: Iterator[Any] = loader.epoch(0)
    for _ in itertools.islice(reading, steps):
        pass
    return loader.state()


def states(world: World, place: str, names: list[str], steps: int) -> list[dict[str, Any]]:
    return [state_after(world, source_named(name, place), steps) for name in names]


def go_on(world: World, place: str, names: list[str], saved: list[dict[str, Any]]) -> list[Batches]:
    result = []
    for name, state in zip(names, saved, strict=True):
        loader = _loader(world, source_named(name, place))
        loader.restore(state)
        result.append(given(loader.epoch(int(state["epoch"]))))
    return result


def read_s3(
    world: World, places: str, options: dict[str, Any], missing: list[str]
) -> tuple[list[Batches], list[str]]:
    """Read without and with a worker; then say what is said of places that are not there."""
    multiprocessing.set_start_method("fork", force=True)
    source = Files(places, storage_options=options, lanes=8)
    read = [given(_loader(world, source, workers=workers).epoch(0)) for workers in (0, 1)]
    said = []
    for place in missing:
        try:
            Files(place, storage_options=options)
        except MusterError as error:
            said.append(str(error))
    return read, said


def fail(world: World, place: str) -> str:
    """Read a file that is damaged in one lane; and files that are others on each rank."""
    said = []
    for places in (f"{place}/*.jsonl", f"{place}/{world.global_rank}/*.txt"):
        try:
            given(_loader(world, Files(places, lanes=4, shuffle=False)).epoch(0))
        except MusterError as error:
            said.append(str(error))
    return "\n--\n".join(said)
