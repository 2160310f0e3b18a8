"""What planning a save of a 70B model takes by number of ranks: DCP's own planning, and that of Checkpointer.

    python benchmarks/save_planning.py [--out benchmarks/results/save-planning.md] [--json save-planning.json] [--folder /dev/shm]

The tensors have the shapes of Llama 3 70B: 723 parameters, and for each the three states of AdamW. They have no memory. Each
figure of DCP comes from a process of its own, with the plans of all ranks, pickled and unpickled as the coordinator receives them; it is
stopped after 180 s of CPU time or at 8 GB. The exchange runs with real clients of a real TCPStore, all on this host.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import pickle
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan as DcpPlan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.manifest import new_name, read_manifest, write_file
from torchmuster.checkpoints.tensor_file import Index, file_head, rank_file
from torchmuster.checkpoints.verify import verify_checkpoint
from torchmuster.train.checkpointing.exchange import RankExchange
from torchmuster.train.checkpointing.planning import layout_digest, plan_save, write_items
from torchmuster.train.checkpointing.storage import (
    WriteFacts,
    _stored_tensors,
    commit_save,
    own_file,
    plan_reads,
    read_tensors,
)

RANKS = (8, 64, 512, 1024, 4096, 16384)
CLIENTS = (64, 128, 256, 512)
_LAYERS, _WIDTH, _KEYS, _HIDDEN, _WORDS = 80, 8192, 1024, 28672, 128256
_MOST_S, _MOST_BYTES = 180, 8 * 10**9
_SMALL = ("model.w", "optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq")


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of Llama 3 70B."""
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (_WORDS, _WIDTH)}
    for layer in range(_LAYERS):
        of_layer = {
            "self_attn.q_proj": (_WIDTH, _WIDTH),
            "self_attn.k_proj": (_KEYS, _WIDTH),
            "self_attn.v_proj": (_KEYS, _WIDTH),
            "self_attn.o_proj": (_WIDTH, _WIDTH),
            "mlp.gate_proj": (_HIDDEN, _WIDTH),
            "mlp.up_proj": (_HIDDEN, _WIDTH),
            "mlp.down_proj": (_WIDTH, _HIDDEN),
            "input_layernorm": (_WIDTH,),
            "post_attention_layernorm": (_WIDTH,),
        }
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return found | {"norm.weight": (_WIDTH,), "lm_head.weight": (_WORDS, _WIDTH)}


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be a rank of a process group without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def state_of_rank(ranks: int) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank with fsdp, without memory."""
    mesh = init_device_mesh("cpu", (ranks,))

    def sharded(shape: tuple[int, ...]) -> torch.Tensor:
        whole = torch.empty(shape, device="meta")
        extent = -(-shape[0] // ranks)
        begin = min(dist.get_rank() * extent, shape[0])
        local = whole[begin : min(begin + extent, shape[0])]
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    tensors = {}
    for name, shape in shapes().items():
        tensors[f"model.{name}"] = sharded(shape)
        tensors[f"optimizer.state.{name}.exp_avg"] = sharded(shape)
        tensors[f"optimizer.state.{name}.exp_avg_sq"] = sharded(shape)
        tensors[f"optimizer.state.{name}.step"] = torch.empty((), device="meta")
    return tensors


def timed(
    work: Callable[[], Any], *, times: int = 1, clock: Callable[[], float] = time.process_time
) -> tuple[float, Any]:
    """Return the median CPU time, or that of another clock, and the last result."""
    took = []
    for _ in range(times):
        begun = clock()
        result = work()
        took.append(clock() - begun)
    return statistics.median(took), result


# ---- before: DCP


def dcp(ranks: int) -> dict[str, Any]:
    """Measure DCP's planning with the plans of all ranks, and a second save with its plan cache."""
    with as_rank(0, ranks):
        tensors = state_of_rank(ranks)
        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=True
        )
        planner.set_up_planner(tensors)
        local_s, first = timed(planner.create_local_plan)
    plans: list[DcpPlan] = []
    sent, unpickle_s = 0, 0.0
    for rank in range(ranks):
        text = pickle.dumps(_plan_of(first, rank, ranks))
        took_s, plan = timed(lambda text=text: pickle.loads(text))  # noqa: S301
        plans.append(plan)
        sent += len(text)
        unpickle_s += took_s
    global_s, (final, _) = timed(lambda: planner.create_global_plan(plans))
    scatter_s, returned = timed(lambda: sum(len(pickle.dumps(plan)) for plan in final))
    # The second save: each rank compares its plan with the cached one, and sends an empty one.
    planner.finish_plan(final[0])
    compare_s, again = timed(planner.create_local_plan)
    assert not again.usable
    cached_s, _ = timed(lambda: planner.create_global_plan([again] * ranks))
    return {
        "local_s": local_s,
        "coordinator_s": unpickle_s + global_s + scatter_s,
        "exchanged_bytes": sent + returned,
        "cached_s": compare_s + cached_s,
        "cached_bytes": 2 * ranks * len(pickle.dumps(again)),
        "items": sum(len(plan.items) for plan in plans),
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _plan_of(plan: DcpPlan, rank: int, ranks: int) -> DcpPlan:
    """Return the plan of another rank: its shards begin elsewhere."""
    return dataclasses.replace(plan, items=[_item_of(one, rank, ranks) for one in plan.items])


def _item_of(item: WriteItem, rank: int, ranks: int) -> WriteItem:
    if item.type is not WriteItemType.SHARD or item.tensor_data is None:
        return item
    size = item.tensor_data.size
    extent = -(-size[0] // ranks)
    begin = min(rank * extent, size[0])
    offsets = torch.Size((begin, *(0 for _ in size[1:])))
    sizes = torch.Size((min(extent, size[0] - begin), *size[1:]))
    chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offsets, sizes=sizes)
    return dataclasses.replace(
        item,
        index=dataclasses.replace(item.index, offset=offsets),
        tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
    )


def dcp_in_a_process(ranks: int) -> dict[str, Any]:
    """Measure in a process with limits; return why there is no figure, if there is none."""
    command = [sys.executable, __file__, "--dcp", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return {"stopped": f"stopped after {_MOST_S} s"}
    if "MemoryError" in done.stderr or done.returncode < 0:
        return {"stopped": f"stopped at {_MOST_BYTES / 10**9:.0f} GB"}
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- after


def ours(ranks: int, folder: Path) -> dict[str, Any]:
    """Measure the planning of rank 0 and of the last rank, the index, and the plan of a load."""
    took = []
    for rank in (0, ranks - 1):
        with as_rank(rank, ranks):
            tensors = state_of_rank(ranks)

            def plan(tensors: dict[str, torch.Tensor] = tensors, rank: int = rank) -> Any:
                layout_digest(tensors, ())
                made = plan_save(tensors, only_first=(), rank=rank, world_size=ranks)
                write_items({name: tensors[name] for name in tensors if name in made.mine})
                return made

            plan_s, made = timed(plan, times=3)
            took.append(plan_s)
            if rank == 0:
                index = Index(tensors=_stored_tensors([], tensors, made))
    store, name = FolderStore(folder), new_name(1)
    write_s, text = timed(lambda: _write_index(store, name, index))
    read_s, _ = timed(lambda: Index.read(store, name), times=3)
    load_s = {}
    for loading in (ranks, max(8, ranks // 2)):
        with as_rank(loading // 2, loading):
            tensors = state_of_rank(loading)
            load_s[loading], _ = timed(lambda tensors=tensors: plan_reads(index, tensors))
    messages = [json.dumps([_record(ranks - 1), ""]), json.dumps(["0" * 64, ""])]
    return {
        "plan_s": max(took),
        "exchanged_bytes": ranks * sum(map(len, messages)),
        "index_bytes": len(text),
        "write_index_s": write_s,
        "read_index_s": read_s,
        "load_s": load_s[ranks],
        "load_half_s": load_s[max(8, ranks // 2)],
    }


def _write_index(store: FolderStore, name: str, index: Index) -> bytes:
    text = index.to_json()
    with store.create(name, "index.json") as stream:
        stream.write(text)
    return text


def _record(rank: int) -> dict[str, Any]:
    """Return what a rank sends to rank 0 after writing."""
    files = {rank_file(rank): [52_000_000, "0" * 64], own_file(rank): [9000, "0" * 64]}
    return {"files": files, "unplanned": []}


def checkpoint_on_disk(ranks: int, folder: Path) -> dict[str, Any]:
    """Commit, verify and read a checkpoint of so many ranks, with files of a few hundred bytes."""
    store, name = FolderStore(folder), new_name(1)
    shape, content = (ranks, 2), torch.arange(2, dtype=torch.float32)
    begun = time.perf_counter()
    written = []
    for rank in range(ranks):
        keys = [(f"{one}@{rank},0", "F32", (1, 2)) for one in _SMALL]
        pieces = [file_head(keys), *[(content + rank).numpy().tobytes()] * len(_SMALL)]
        records = {
            rank_file(rank): write_file(store, name, rank_file(rank), pieces),
            own_file(rank): write_file(store, name, own_file(rank), [b"{}"]),
        }
        files = {one: [record.size_bytes, record.sha256] for one, record in records.items()}
        written.append({"files": files, "unplanned": []})
    write_s = time.perf_counter() - begun
    with as_rank(0, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        whole = torch.empty(shape, device="meta")
        one = DTensor.from_local(
            whole[:1], mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        tensors: dict[str, torch.Tensor] = dict.fromkeys(_SMALL, one)
        plan = plan_save(tensors, only_first=(), rank=0, world_size=ranks)
    facts = WriteFacts(step=1, world_size=ranks, strategy="fsdp", global_batch_size=None)
    commit_s, _ = timed(
        lambda: commit_save(
            store, name, facts, written, tensors=tensors, plan=plan, tied={}, rest={}
        ),
        clock=time.perf_counter,
    )
    manifest_s, manifest = timed(lambda: read_manifest(store, name), clock=time.perf_counter)
    verify_s, findings = timed(lambda: verify_checkpoint(store, name), clock=time.perf_counter)
    assert findings == []
    read: dict[str, torch.Tensor] = {one: torch.zeros(shape) for one in _SMALL}
    index = Index.read(store, name)
    load_s, _ = timed(
        lambda: read_tensors(store, name, index, manifest.files, read), clock=time.perf_counter
    )
    expected = torch.arange(ranks, dtype=torch.float32)[:, None] + content
    assert all(torch.equal(tensor, expected) for tensor in read.values())
    entries = max(
        len(list(one.iterdir())) for one in [folder / name, *(folder / name).glob("ranks-*")]
    )
    found = {
        "ranks": ranks,
        "files": len(manifest.files) + 1,
        "write_s": write_s,
        "commit_s": commit_s,
        "manifest_bytes": store.size(name, "manifest.json"),
        "read_manifest_s": manifest_s,
        "verify_s": verify_s,
        "load_all_s": load_s,
        "most_entries": entries,
    }
    delete_s, _ = timed(lambda: store.delete(name), clock=time.perf_counter)
    return {**found, "delete_s": delete_s}


# ---- the exchange


_PER_PROCESS = 64


def exchange(clients: int) -> dict[str, Any]:
    """Time the exchange of file records between real clients of a TCPStore, in processes of 64."""
    _, few_cpu_s = _exchanges(clients, 3)
    took, cpu_s = _exchanges(clients, 11)
    # The first exchange waits for all to connect.
    return {
        "clients": clients,
        "exchange_s": statistics.median(took[1:]),
        "store_cpu_s": (cpu_s - few_cpu_s) / 8,
    }


def _exchanges(clients: int, times: int) -> tuple[list[float], float]:
    """Return the times of exchanges, and the CPU time of this process, which has only the store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    began_s = time.process_time()
    with context.Pool(clients // _PER_PROCESS) as pool:
        firsts = range(0, clients, _PER_PROCESS)
        arguments = [(server.port, first, clients, times) for first in firsts]
        took = list(itertools.chain(*pool.starmap(_clients, arguments, chunksize=1)))
    return took[0], time.process_time() - began_s


def _clients(port: int, first: int, clients: int, times: int) -> list[list[float]]:
    ranks = range(first, first + _PER_PROCESS)
    took: list[list[float]] = [[] for _ in ranks]
    exchanges = [
        RankExchange(rank, clients, TCPStore("127.0.0.1", port, is_master=False)) for rank in ranks
    ]

    def run(place: int) -> None:
        record = _record(first + place)
        for _ in range(times):
            work_s, _ = timed(
                lambda: exchanges[place].run(lambda: record, len), clock=time.perf_counter
            )
            took[place].append(work_s)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(_PER_PROCESS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return took


# ---- the report


def render(found: Mapping[str, Any]) -> str:
    """Return the page."""
    after, before, disk = found["ours"], found["dcp"], found["disk"]
    lines = [
        "# Planning a save, by number of ranks",
        "",
        "Written by",
        "",
        "    python benchmarks/save_planning.py --folder /dev/shm --out benchmarks/results/save-planning.md",
        "",
        f"Measured on {date.today()} on {platform.machine()} with {found['cores']} cores that also did other work, torch "
        f"{found['torch']}. The tensors are those of Llama 3 70B with AdamW under fsdp: {found['tensors']:,} tensors "
        f"({len(shapes())} parameters, and three states each), without memory. One process computes for one rank, and for the coordinator.",
        "",
        "## torch.distributed.checkpoint (DCP)",
        "",
        "All ranks send their plans to one coordinator, which merges them and sends each rank its part. The CPU time is that of one rank's own "
        "plan, and of the coordinator: unpickle, merge and validate, pickle. *Second save* is the same with `enable_plan_caching`, if no "
        f"plan has changed. A process was stopped after {_MOST_S} s of CPU time or at {_MOST_BYTES / 10**9:.0f} GB.",
        "",
        "| ranks | own plan | coordinator | sent and received | memory of the coordinator | second save | sent in second save |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in RANKS:
        one = before[str(ranks)]
        if "stopped" in one:
            lines.append(f"| {ranks:,} | | {one['stopped']} | | | | |")
            continue
        lines.append(
            f"| {ranks:,} | {one['local_s']:.2f} s | {one['coordinator_s']:.1f} s | {_size(one['exchanged_bytes'])} | "
            f"{_size(one['rss_bytes'])} | {one['cached_s']:.2f} s | {_size(one['cached_bytes'])} |"
        )
    lines += [
        "",
        "## Checkpointer",
        "",
        "Each rank computes its own part from the shapes and placements that it knows. The CPU time is the longer one of rank 0 and the last rank, "
        "the median of 3; it is needed in every save, because no plan is kept. *Exchanged* is what all ranks together send to rank 0, through "
        "the store: a hash of the layout, then the size and SHA-256 of two files.",
        "",
        "| ranks | plan | exchanged | index.json | write it | read it | plan a load | plan a load on half as many ranks |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in RANKS:
        one = after[str(ranks)]
        lines.append(
            f"| {ranks:,} | {one['plan_s']:.2f} s | {_size(one['exchanged_bytes'])} | {_size(one['index_bytes'])} | "
            f"{one['write_index_s']:.2f} s | {one['read_index_s']:.2f} s | {one['load_s']:.2f} s | {one['load_half_s']:.2f} s |"
        )
    slope = found["exchange_per_rank_s"]
    last = found["exchange"][-1]
    store = last["store_cpu_s"] / last["clients"]
    lines += [
        "",
        "## The exchange",
        "",
        "Each rank sends its record to the leader of its 64 ranks, the leaders to rank 0, and all wait for one answer. Here all ranks are threads "
        f"of processes on {found['cores']} cores, together with the store's server, so these times include the work of all ranks:",
        "",
        "| ranks | time | CPU time of the store |",
        "|---:|---:|---:|",
        *(
            f"| {one['clients']:,} | {one['exchange_s'] * 1000:.0f} ms | {one['store_cpu_s'] * 1000:.1f} ms |"
            for one in found["exchange"]
        ),
        "",
        f"The times grow by {slope * 1e6:.0f} µs per rank. If that continues, 4,096 ranks take {4096 * slope:.1f} s, and 16,384 ranks take {16384 * slope:.1f} s, "
        "twice per save. Training continues meanwhile, but the next update waits for the first of the two "
        "exchanges and for the copy. This is an extrapolation: more than "
        f"{max(CLIENTS)} clients were not tested. On a real cluster the ranks' own work is spread over their hosts, but the network adds its delay. "
        f"The store, which is one process, needs {store * 1e6:.0f} µs of CPU time per rank: {16384 * store:.1f} s for 16,384 ranks.",
        "",
        f"## A checkpoint of {disk['ranks']:,} ranks",
        "",
        f"{disk['files']:,} files of a few hundred bytes each, written by one process to a folder in {found['folder']}; at most {disk['most_entries']:,} entries are in one "
        "folder. Wall-clock times:",
        "",
        "| | |",
        "|---|---:|",
        f"| write all files, read each one back | {disk['write_s']:.1f} s |",
        f"| commit: compare all sizes, write index, state and manifest | {disk['commit_s']:.2f} s |",
        f"| size of the manifest | {_size(disk['manifest_bytes'])} |",
        f"| read the manifest | {disk['read_manifest_s']:.2f} s |",
        f"| verify: hash all files, in one process | {disk['verify_s']:.1f} s |",
        f"| load whole tensors in one process, from all files | {disk['load_all_s']:.1f} s |",
        f"| delete | {disk['delete_s']:.1f} s |",
        "",
    ]
    return "\n".join(lines)


def _size(count: float) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count:.0f} B"


def measure(folder: Path) -> dict[str, Any]:
    """Measure everything."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cores": multiprocessing.cpu_count(),
        "folder": str(folder),
    }
    with as_rank(0, 8):
        found["tensors"] = len(state_of_rank(8))
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        found["ours"] = {}
        for ranks in RANKS:
            found["ours"][str(ranks)] = ours(ranks, place)
            print("ours", ranks, found["ours"][str(ranks)], file=sys.stderr)
        found["disk"] = checkpoint_on_disk(max(RANKS), place)
        print(found["disk"], file=sys.stderr)
    finally:
        shutil.rmtree(place)
    found["exchange"] = [exchange(clients) for clients in CLIENTS]
    print(found["exchange"], file=sys.stderr)
    small, large = found["exchange"][0], found["exchange"][-1]
    found["exchange_per_rank_s"] = (large["exchange_s"] - small["exchange_s"]) / (
        large["clients"] - small["clients"]
    )
    found["dcp"] = {}
    stopped: dict[str, Any] | None = None
    for ranks in RANKS:
        if stopped is None:
            one = dcp_in_a_process(ranks)
            stopped = {"stopped": "not tried"} if "stopped" in one else None
        else:
            one = stopped
        found["dcp"][str(ranks)] = one
        print("dcp", ranks, one, file=sys.stderr)
    return found


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the page")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--render", type=Path, help="write the page from these figures")
    parser.add_argument("--dcp", type=int, help="measure only DCP with so many ranks")
    asked = parser.parse_args()
    if asked.dcp:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_S, _MOST_S + 1))
        print(json.dumps(dcp(asked.dcp)))
        return
    found = json.loads(asked.render.read_text()) if asked.render else measure(asked.folder)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    page = render(found)
    print(page)
    if asked.out:
        asked.out.write_text(page)


if __name__ == "__main__":
    main()
