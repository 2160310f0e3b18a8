"""What DCP's planning of a save takes on rank 0 with many ranks, with and without its plan cache; no rank is started.

    python benchmarks/save_planning.py [--ranks 64 1024 4096] [--tensors 100]

Every simulated rank has a part of each tensor, as with FSDP. Measured is the CPU time of rank 0's global plan (it also
has to receive and unpickle the ranks' lists, whose size is shown), in the first save and in the second with the cache.
A model has three tensors per parameter with AdamW: 873 for Llama 3 8B, 2,169 for 70B. Time and bytes grow linearly with
their number.
"""

import argparse
import pickle
import time

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

_ROWS, _COLUMNS = 4, 4096  # of a tensor on each rank


def plan_of(rank: int, ranks: int, tensors: int) -> SavePlan:
    """Return what a rank sends to rank 0."""
    offset = torch.Size((rank * _ROWS, 0))
    chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size((_ROWS, _COLUMNS)))
    whole = torch.Size((ranks * _ROWS, _COLUMNS))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(), size=whole)
    return SavePlan(
        [
            WriteItem(
                index=MetadataIndex(f"model.layers.{number}.weight", offset),
                type=WriteItemType.SHARD,
                tensor_data=data,
            )
            for number in range(tensors)
        ]
    )


def measure(ranks: int, tensors: int) -> str:
    """Plan two saves; return the figures as a row."""
    plans = [plan_of(rank, ranks, tensors) for rank in range(ranks)]
    sent_bytes = len(pickle.dumps(plans[-1])) * ranks
    planner = type(f"Planner{ranks}", (DefaultSavePlanner,), {})
    times = []
    for sent in (plans, [SavePlan([], usable=False)] * ranks):
        rank_0 = planner(flatten_state_dict=False, enable_plan_caching=True)
        rank_0.set_up_planner({}, is_coordinator=True)
        began = time.process_time()
        rank_0.create_global_plan(sent)
        times.append(time.process_time() - began)
    first, second = times
    return f"{ranks:>6} | {first:8.2f} s | {sent_bytes / 1e6:8.1f} MB | {second * 1e3:8.2f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--tensors", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{arguments.tensors} tensors, torch {torch.__version__}")
    print(" ranks | first plan | sent to rank 0 | second plan, cached")
    for ranks in arguments.ranks:
        print(measure(ranks, arguments.tensors), flush=True)


if __name__ == "__main__":
    main()
