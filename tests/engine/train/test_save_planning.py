"""Which rank writes what: planned by each rank for itself, and every byte is written once."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchmuster.checkpoints.store import FolderStore
from torchmuster.checkpoints.manifest import Manifest, new_name, read_manifest
from torchmuster.checkpoints.tensor_file import Index, read_file_head
from torchmuster.checkpoints.verify import verify_checkpoint
from torchmuster.errors import Impossible
from torchmuster.train.checkpointing.planning import (
    SavePlan,
    assign_writers,
    holdings_of,
    layout_digest,
    plan_save,
)
from torchmuster.train.checkpointing.storage import (
    WriteFacts,
    commit_save,
    read_tensors,
    unstaged_bytes,
    write_rank_files,
)

pytestmark = pytest.mark.engine

# The whole tensors, and how a rank divides them.
Whole = Mapping[str, torch.Tensor]
Divide = Callable[[Whole], dict[str, torch.Tensor]]


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(whole: torch.Tensor, mesh: Any, *placements: Placement) -> torch.Tensor:
    return distribute_tensor(
        whole, DeviceMesh("cpu", torch.as_tensor(mesh)), placements, src_data_rank=None
    )


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).view(shape)


def save(
    folder: Path, whole: Whole, divide: Divide, ranks: int, *, only_first: Sequence[str] = ()
) -> tuple[FolderStore, Manifest, Index]:
    """Save as each of the ranks, one after another; read it back and compare it."""
    store, name = FolderStore(folder), new_name(1)
    written, digests, held = [], set(), []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            tensors = divide(whole)
            digests.add(layout_digest(tensors, only_first))
            held.append(holdings_of(tensors, only_first if rank else ()))
    writers = assign_writers(held) if len(digests) > 1 else None
    for rank in reversed(range(ranks)):
        with as_rank(rank, ranks):
            tensors = divide(whole)
            plan = plan_save(tensors, only_first=only_first, rank=rank, world_size=ranks)
            if writers is not None:
                mine = frozenset(one for one, theirs in writers.items() if rank in theirs)
                plan = SavePlan(mine=mine, splits={})
            written.append(
                write_rank_files(
                    store,
                    name,
                    tensors,
                    plan,
                    rank=rank,
                    own={"rank": rank},
                    take=unstaged_bytes,
                    rest_after=lambda count: None,
                )
            )
    facts = WriteFacts(step=1, world_size=ranks, strategy="fsdp", global_batch_size=8)
    with as_rank(0, ranks):
        commit_save(
            store,
            name,
            facts,
            written[::-1],
            tensors=divide(whole),
            plan=plan,
            tied={},
            rest={},
        )
    manifest = read_manifest(store, name)
    assert manifest is not None
    assert verify_checkpoint(store, name) == []
    index = Index.read(store, name)
    read = {one: torch.zeros_like(tensor) for one, tensor in whole.items()}
    read_tensors(store, name, index, manifest.files, read)
    for one, tensor in whole.items():
        assert torch.equal(read[one], tensor), one
    stored = sum(_content_bytes(store, name, file) for file in manifest.files)
    assert stored == sum(tensor.nbytes for tensor in whole.values())  # each byte once
    return store, manifest, index


def _content_bytes(store: FolderStore, name: str, file: str) -> int:
    if not file.endswith(".safetensors"):
        return 0
    with store.open(name, file) as stream:
        entries = read_file_head(stream, store.sizes(name)[file])
    return sum(one.end - one.begin for one in entries.values())


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[int, torch.Tensor, list[tuple[torch.Tensor, list[Placement]]]]:
    """Draw a mesh in any order of ranks, and tensors that are divided over it evenly or not."""
    mesh_shape = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (1, 3), (2, 1, 2)]))
    ranks = math.prod(mesh_shape)
    order = draw(st.sampled_from(["usual", "reversed", "transposed"]))
    mesh = torch.arange(ranks).view(mesh_shape)
    if order == "reversed":
        mesh = mesh.flip(0)
    elif order == "transposed":
        mesh = torch.arange(ranks).view(mesh_shape[::-1]).permute(*reversed(range(mesh.ndim)))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
        placements = draw(
            st.lists(
                st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))]),
                min_size=len(mesh_shape),
                max_size=len(mesh_shape),
            )
        )
        tensors.append((numbers(*shape), placements))
    return ranks, mesh, tensors


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(layouts())
def test_any_division_is_written_once_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any
) -> None:
    ranks, mesh, tensors = drawn
    whole = {f"t{number}": tensor for number, (tensor, _) in enumerate(tensors)}

    def divide(whole: Whole) -> dict[str, torch.Tensor]:
        pairs = zip(whole.items(), tensors, strict=True)
        divided = {name: sharded(one, mesh, *places) for (name, one), (_, places) in pairs}
        return {**divided, "plain": whole_plain}

    whole_plain = numbers(3, 2)
    save(
        tmp_path_factory.mktemp("save"),
        {**whole, "plain": whole_plain},
        lambda one: divide(whole),
        ranks,
    )


def test_an_even_division_takes_no_room_in_the_index(tmp_path: Path) -> None:
    whole = {
        "rows": numbers(10, 3),
        "few rows": numbers(2, 3),
        "columns": numbers(3, 9),
        "copied": numbers(5),
        "scalar": torch.tensor(4.0),
        "none": torch.zeros(0, 3),
        "plain": numbers(7),
        "mean": numbers(2),
    }
    mesh = [[0, 1, 2], [3, 4, 5]]  # two replicas of three shards

    def divide(whole: Whole) -> dict[str, torch.Tensor]:
        return {
            **whole,
            "rows": sharded(whole["rows"], mesh, Replicate(), Shard(0)),
            "few rows": sharded(whole["few rows"], mesh, Replicate(), Shard(0)),
            "columns": sharded(whole["columns"], mesh, Shard(0), Shard(1)),
            "copied": sharded(whole["copied"], mesh, Replicate(), Replicate()),
            "scalar": sharded(whole["scalar"], mesh, Replicate(), Replicate()),
        }

    _, manifest, index = save(tmp_path, whole, divide, 6, only_first=["mean"])
    assert all(one.chunks == () for one in index.tensors.values())
    assert index.tensors["none"].split is None
    files = {name: [piece.file for piece in one.pieces()] for name, one in index.tensors.items()}
    assert files["mean"] == ["rank-00000.safetensors"]
    assert files["rows"] in (
        [f"rank-0000{rank}.safetensors" for rank in (0, 1, 2)],
        [f"rank-0000{rank}.safetensors" for rank in (3, 4, 5)],
    )
    assert len(files["few rows"]) == 2  # the third rank has none of it
    assert [list(one.shape) for one in index.tensors["rows"].pieces()] == [[4, 3], [4, 3], [2, 3]]
    assert len(set(files["columns"])) == 6
    assert len(manifest.files) == 6 * 2 + 2


def test_what_is_divided_otherwise_is_listed_chunk_by_chunk(tmp_path: Path) -> None:
    whole = {"strided": numbers(8, 3), "twice": numbers(9), "odd ranks": numbers(8)}

    def divide(whole: Whole) -> dict[str, torch.Tensor]:
        square = [[0, 1], [2, 3]]
        return {
            "strided": sharded(
                whole["strided"], square, _StridedShard(0, split_factor=2), Shard(0)
            ),
            "twice": sharded(whole["twice"], square, Shard(0), Shard(0)),
            "odd ranks": sharded(whole["odd ranks"], [0, 1, 3, 2], Shard(0)),
        }

    _, _, index = save(tmp_path, whole, divide, 4)
    assert [len(one.chunks) for one in index.tensors.values()] == [4, 4, 4]


def test_meshes_that_differ_between_ranks(tmp_path: Path) -> None:
    """Each half of the ranks has its own mesh with the same shards; some tensors only one rank has."""
    whole = {"w": numbers(5, 2), "of rank 1": numbers(3), "mean": numbers(2)}

    def divide(whole: Whole) -> dict[str, torch.Tensor]:
        rank = dist.get_rank()
        mesh = [0, 1] if rank < 2 else [2, 3]
        divided = {"w": sharded(whole["w"], mesh, Shard(0)), "mean": whole["mean"] + rank}
        return {**divided, "of rank 1": whole["of rank 1"]} if rank == 1 else divided

    _, _, index = save(tmp_path, whole, divide, 4, only_first=["mean"])
    assert [piece.file for piece in index.tensors["mean"].pieces()] == ["rank-00000.safetensors"]


def test_shards_that_overlap_are_refused(tmp_path: Path) -> None:
    whole = {"w": numbers(4)}

    def divide(whole: Whole) -> dict[str, torch.Tensor]:
        return {"w": whole["w"] if dist.get_rank() else sharded(whole["w"], [0, 1], Shard(0))}

    with pytest.raises(Impossible, match="two ranks have the same elements"):
        save(tmp_path, whole, divide, 2)


def test_a_plan_follows_the_state(tmp_path: Path) -> None:
    """Nothing is kept from the save before: Automodel#3369 saved new states with an old plan."""
    weight = numbers(6, 2)
    first = {"model.w": weight}
    later = {
        "model.w": numbers(4, 4),  # another shape
        "optimizer.state.w.exp_avg": numbers(4, 4),  # a state that came with the first step
        "other.w": numbers(5),  # another model
    }

    def by_rows(whole: Whole) -> dict[str, torch.Tensor]:
        return {name: sharded(one, [0, 1], Shard(0)) for name, one in whole.items()}

    def by_columns(whole: Whole) -> dict[str, torch.Tensor]:
        places = {name: Shard(one.ndim - 1) for name, one in whole.items()}
        return {name: sharded(one, [0, 1], places[name]) for name, one in whole.items()}

    for whole, divide in (
        (first, by_rows),
        (later, by_rows),
        (later, by_columns),
        ({**later, "other.w": numbers(5) * 2}, dict),  # the same names, no longer sharded
        (first, by_rows),
    ):
        save(tmp_path, whole, divide, 2)


def test_ranks_write_equal_amounts(tmp_path: Path) -> None:
    sizes = [7, 300, 40, 41, 39, 120, 121, 119, 5, 60, 61, 200]
    whole = {f"plain{n}": numbers(size) for n, size in enumerate(sizes)}
    whole |= {f"copied{n}": numbers(size, 2) for n, size in enumerate(sizes)}

    def divide(whole: Whole) -> dict[str, torch.Tensor]:
        mesh = [[0, 1], [2, 3]]
        return {
            name: sharded(one, mesh, Replicate(), Shard(0)) if "copied" in name else one
            for name, one in whole.items()
        }

    store, manifest, _ = save(tmp_path, whole, divide, 4)
    written = [
        _content_bytes(store, manifest.name, f"rank-0000{rank}.safetensors") for rank in range(4)
    ]
    assert max(written) < 1.1 * min(written)
