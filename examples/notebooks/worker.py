"""The other rank of a notebook that has opened a TCPStore: does what the notebook does, until it says end.

    python worker.py --address 192.168.29.67 [--port 12355] [--rank 1] [--world-size 2]

The notebook names what is to be done by a key of the store, and only what is known here is done.
"""

import argparse

import torch.distributed as dist
from meeting import PORT, find_store, join, test_all_gather_basic

KNOWN = {"test_all_gather_basic": test_all_gather_basic}


def main() -> None:
    """Come to the store, form the group, take part."""
    parser = argparse.ArgumentParser(description="The other rank of a notebook.")
    parser.add_argument("--address", required=True, help="of the notebook's machine")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    store = find_store(options.address, options.port, options.world_size)
    join(store, options.rank, options.world_size)
    number = 0
    while (name := store.get(f"call-{number}").decode()) != "end":
        KNOWN[name]()
        number += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
