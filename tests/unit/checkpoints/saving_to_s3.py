"""A program that saves to S3 and does what it is told on stdin, one word a line; answers are JSON.

It is a process of its own because the client of S3 keeps a thread for as long as its process lives.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec

from made_up_checkpoints import save
from torchmuster.checkpoints import object_storage
from torchmuster.checkpoints.export import export_weights
from torchmuster.checkpoints.manifest import new_name, write_file
from torchmuster.checkpoints.store import open_store
from torchmuster.checkpoints.verify import newest_good, verify_checkpoint
from torchmuster.errors import MusterError

PART_BYTES = 5 * 2**20  # the smallest that S3 has


def main(url: str) -> None:
    object_storage._PART_BYTES = PART_BYTES
    store = open_store(url)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        answer: object = None
        try:
            if word == "bucket":
                fsspec.filesystem("s3").mkdir(rest)
            elif word == "save":
                answer = save(store, int(rest)).name
            elif word == "deep":
                name, file = new_name(int(rest)), "ranks-00500/rank-00501.json"
                write_file(store, name, file, [b"{}"])
                answer = [store.sizes(name), store.size(name, "rank-00501.json")]
                store.delete(name)
            elif word == "upload":
                write_file(store, new_name(int(rest)), "rank-00000.safetensors", _slowly())
            elif word == "break-off":
                write_file(store, new_name(int(rest)), "rank-00000.safetensors", _broken_off())
            elif word == "names":
                answer = {name: len(store.sizes(name)) for name in store.names()}
            elif word == "newest":
                found = newest_good(store)
                answer = found and found.name
            elif word == "checked":
                answer = store.checked_on_arrival()
            elif word == "verify":
                answer = [one.name for one in verify_checkpoint(store, rest)]
            elif word == "export":
                answer = export_weights(store, store.names()[-1], Path(rest)).files
            elif word == "spoil":
                path = f"{url}/{rest}/state.json"
                content = bytes(store.sizes(rest)["state.json"])
                fsspec.filesystem("s3").pipe_file(path, content)
            elif word == "delete":
                store.delete(rest)
        except KeyError as error:
            answer = error.args[0]
        except MusterError as error:
            answer = {"error": str(error).splitlines()}
        print(json.dumps(answer), flush=True)


def _broken_off() -> Iterator[bytes]:
    yield bytes(PART_BYTES + 1)
    raise KeyError("broken off by the writer")


def _slowly() -> Iterator[bytes]:
    """Two parts; between them whoever watches may do something to the service."""
    yield bytes(PART_BYTES + 1)
    print(json.dumps("a part is there"), flush=True)
    sys.stdin.readline()
    yield bytes(PART_BYTES + 1)


if __name__ == "__main__":
    main(sys.argv[1])
