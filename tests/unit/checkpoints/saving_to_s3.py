"""A program that saves to S3 and does what it is told on stdin, one word a line; answers are JSON.

It is a process of its own because the client of S3 keeps a thread for as long as its process lives.
"""

import json
import sys
from pathlib import Path

import fsspec

from made_up_checkpoints import SHARD, save
from torchmuster.checkpoints.export import local_checkpoint
from torchmuster.checkpoints.manifest import committed_manifests, new_name
from torchmuster.checkpoints.store import open_store
from torchmuster.checkpoints.verify import newest_good, verify_checkpoint
from torchmuster.errors import MusterError


def main(url: str) -> None:
    store = open_store(url)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        answer: object = None
        try:
            if word == "bucket":
                fsspec.filesystem("s3").mkdir(rest)
            elif word == "save":
                answer = save(store, int(rest)).name
            elif word == "upload":
                store.upload(new_name(40), Path(rest))
            elif word == "names":
                answer = {name: len(store.sizes(name)) for name in store.names()}
            elif word == "newest":
                found = newest_good(store)
                answer = found and found.name
            elif word == "verify":
                answer = [one.name for one in verify_checkpoint(store, rest)]
            elif word == "download":
                manifest = committed_manifests(store)[0]
                with local_checkpoint(store, manifest) as folder:
                    answer = sorted(path.name for path in folder.iterdir())
            elif word == "spoil":
                file = SHARD.format(1)
                path = f"{url}/{rest}/{file}"
                content = bytes(store.sizes(rest)[file] or 0)
                fsspec.filesystem("s3").pipe_file(path, content)
            elif word == "delete":
                store.delete(rest)
        except MusterError as error:
            answer = {"error": str(error).splitlines()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
