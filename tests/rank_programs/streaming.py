"""A rank that reads a stream of text and resumes it."""

import itertools
from typing import Any

from torchmuster.errors import MusterError
from torchmuster.train.data.formats import RecordFormat
from torchmuster.train.data.stream import StreamLoader
from torchmuster.train.data.text import TextFormat, TextStream, open_files
from torchmuster.train.data.tokenizers import ByteTokenizer
from torchmuster.train.world import World

Ids = list[list[list[int]]]  # of each micro-batch


def loader(world: World, place: str) -> StreamLoader:
    text = TextFormat(tokenizer=ByteTokenizer(), sequence_length=24)
    records = open_files(place, RecordFormat(), options={"streaming": True})
    return StreamLoader(TextStream(records, text), world, global_batch_size=4)


def ids_of(steps: Any) -> Ids:
    return [micro.batch["input_ids"][: micro.samples].tolist() for step in steps for micro in step]


def read_and_resume(world: World, place: str, stop: int) -> tuple[Ids, Ids, dict[str, Any]]:
    """Return a whole epoch, what follows after some steps, and the position between them."""
    whole = ids_of(loader(world, place).epoch(0))
    first = loader(world, place)
    list(itertools.islice(first.epoch(0), stop))
    state = first.state()
    second = loader(world, place)
    second.restore(state)
    return whole, ids_of(second.epoch(0)), state


def fail(world: World, place: str) -> str:
    try:
        ids_of(loader(world, place).epoch(0))
    except MusterError as error:
        return str(error)
    return ""
