"""Trainings that are saved and read back, by Checkpointer, on any number of ranks."""

import hashlib
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from patience import GIVE_UP_S
from torchmuster.checkpoints.manifest import MARKER, FileRecord, committed_manifests, read_manifest
from torchmuster.checkpoints.store import FolderStore
from torchmuster.errors import MusterError
from torchmuster.train import seeds
from torchmuster.train.checkpointing import checkpointer as checkpointer_module
from torchmuster.train.checkpointing.checkpointer import Checkpointer, Loaded, SaveReport
from torchmuster.train.strategies.ddp import Ddp
from torchmuster.train.strategies.fsdp import Fsdp
from torchmuster.train.strategies.sharding import Sharding
from torchmuster.train.strategies.single import Single
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.weights import whole_tensor
from torchmuster.train.world import World, all_gather_object

DAMAGES = (
    "cut",
    "longer",
    "empty",
    "flipped",
    "flipped first",
    "flipped last",
    "gone",
    "bomb",
)


class Kinds(nn.Module):
    """Every kind of tensor that a model can have, in sizes that no number of ranks divides."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.layers[1].requires_grad_(False)  # frozen
        self.norm = nn.BatchNorm1d(width)  # counts batches in int64
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.register_buffer("rough", torch.arange(5).to(torch.bfloat16) / 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.as_tensor(self.head(self.norm(x))).square().mean()


class Training:
    """A model and its optimizer under a strategy, and plain steps."""

    def __init__(
        self, world: World, way: str, *, seed: int = 0, width: int = 6, kind: str = "AdamW"
    ) -> None:
        self.world = world
        strategies: dict[str, Any] = {
            "ddp": Ddp,
            "fsdp": Fsdp,
            "hybrid": partial(Fsdp, sharding=Sharding(kind="hybrid_shard", shard_size=2)),
            "single": Single,
        }
        self.strategy: Strategy = strategies[way](world)
        torch.manual_seed(seed)
        self.model = self.strategy.prepare(Kinds(width))
        trained = [one for one in self.model.parameters() if one.requires_grad]
        options = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(
            trained, lr=0.01, **options
        )
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step * 64 + self.world.global_rank)
            self.model(torch.randint(11, (8,), generator=generator)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self) -> dict[str, Any]:
        state = self.strategy.state_dict(self.model, self.optimizer)
        odd = {"inf": float("inf"), "pair": (1, 0.1), "by step": {3: "three"}}
        return {**state, "progress": {"step": self.step, "odd": odd, "none": None, "yes": True}}

    def save(self, checkpointer: Checkpointer) -> None:
        checkpointer.save(self.state(), self.step, own=seeds.save_random_states(self.world))

    def restore(self, loaded: Loaded) -> None:
        self.strategy.load_state_dict(self.model, loaded.state, self.optimizer)
        self.step = loaded.state["progress"]["step"]

    def digest(self) -> str:
        """Return a hash over every value of model and optimizer, with rank 0's buffers; all ranks call it."""
        found = hashlib.sha256()
        _add(found, {k: v for k, v in self.state().items() if k != "progress"})
        return str(all_gather_object(found.hexdigest(), self.world)[0])


def _add(found: Any, part: Any) -> None:
    if isinstance(part, dict):
        for key in sorted(part):
            found.update(str(key).encode())
            _add(found, part[key])
    elif isinstance(part, list | tuple):
        for one in part:
            _add(found, one)
    elif isinstance(part, torch.Tensor):
        whole = whole_tensor(part.detach()).contiguous()
        found.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
        found.update(bytes(whole.flatten().view(torch.uint8).tolist()))
    else:
        found.update(repr(part).encode())


def relay(
    world: World, folder: Path, places: list[str], saves: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read each folder into each strategy, then train and save anew; return what was read and saved."""
    strategies = {1: ["fsdp", "single"], 4: ["fsdp", "ddp", "hybrid"]}.get(
        world.world_size, ["fsdp", "ddp"]
    )
    read = {
        f"{place} into {strategy}": _read(world, folder / place, strategy)
        for place in places
        for strategy in strategies
    }
    return read, {
        f"{strategy}-{world.world_size}": _save(world, folder, strategy) for strategy in saves
    }


def _read(world: World, place: Path, strategy: str) -> tuple[str, int, bool, str]:
    training = Training(world, strategy, seed=1)
    with Checkpointer(place) as checkpointer:
        loaded = checkpointer.load(training.state())
    assert loaded is not None
    training.restore(loaded)
    held = loaded.state["model"]["norm.running_mean"].tolist()
    assert all_gather_object(held, world) == [held] * world.world_size
    assert loaded.newest.manifest.global_batch_size == 16
    return training.digest(), loaded.step, loaded.own is not None, repr(loaded.state["progress"])


def _save(world: World, folder: Path, strategy: str) -> str:
    training = Training(world, strategy)
    with Checkpointer(
        folder / f"{strategy}-{world.world_size}", strategy=strategy, global_batch_size=16
    ) as checkpointer:
        training.train(3)
        digest = training.digest()
        training.save(checkpointer)
        training.train(2)
    return digest


def on_meshes(world: World, folder: Path) -> list[str]:
    """Save states on meshes of all kinds, each another than before; return what came back wrong."""
    weight = torch.arange(1.0, 1 + 7 * 6).view(7, 6)
    square = init_device_mesh("cpu", (2, world.world_size // 2), mesh_dim_names=("copy", "shard"))
    line = init_device_mesh("cpu", (world.world_size,))
    states: list[dict[str, Any]] = [
        {"w": _on(square, weight, Replicate(), Shard(0))},
        # a state that came later, and another division
        {
            "w": _on(square, weight, Shard(0), Shard(1)),
            "exp_avg": _on(line, weight * 2, Shard(1)),
            "step": torch.tensor(3.0),
        },
        {"w": _on(square, weight[:6], _StridedShard(0, split_factor=2), Shard(0))},
        {
            "w": _on(square["shard"], weight, Shard(0)),
            "step": torch.tensor(4.0),
        },  # ranks have two meshes
        {"w": weight},
    ]
    wrong = []
    with Checkpointer(folder / "meshes", keep=2) as checkpointer:
        for number, tensors in enumerate(states, start=1):
            checkpointer.save({"model": tensors}, number)
            report = checkpointer.wait()
            assert report is not None
            assert report.problem is None, report.problem
            for places in ([Shard(1), Replicate()], [Shard(0), Shard(0)]):
                whole = {name: whole_tensor(one) for name, one in tensors.items()}
                room = {
                    name: torch.zeros_like(one)
                    if one.ndim == 0
                    else _on(square, torch.zeros_like(one), *places)
                    for name, one in whole.items()
                }
                loaded = checkpointer.load({"model": room})
                assert loaded is not None
                assert loaded.step == number
                wrong += [
                    f"{number} {places}: {name}"
                    for name, one in room.items()
                    if not torch.equal(whole_tensor(one), whole[name])
                ]
    return wrong


def _on(mesh: DeviceMesh, whole: torch.Tensor, *placements: Placement) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


class Obstructed(HuggingFaceStorageWriter):
    """Torch's writer, which fails, or waits, when a rank's tensors are written."""

    fails = False
    gate: threading.Event | None = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        if Obstructed.gate is not None:
            assert Obstructed.gate.wait(GIVE_UP_S)
        written = super().write_data(plan, planner)
        if Obstructed.fails:
            raise OSError(28, "No space left on device")
        return written


class NoManifest(FolderStore):
    """A folder whose disk may be full when the manifest is written."""

    fails = False

    def write(self, name: str, file: str, content: bytes) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        super().write(name, file, content)


def go_wrong(world: World, folder: Path) -> dict[str, Any]:
    """Let saves fail in several ways, and one be slow; return what was said."""
    result: dict[str, Any] = {"problems": [], "left": []}
    heard: list[SaveReport] = []
    store = NoManifest(folder / "shared")
    training = Training(world, "ddp")
    training.train(1)
    checkpointer_module.HuggingFaceStorageWriter = Obstructed  # type: ignore[misc]
    with Checkpointer(store, keep=2, on_saved=heard.append) as checkpointer:
        result["nothing yet"] = checkpointer.load(training.state())
        training.save(checkpointer)
        # One rank fails in writing its tensors, then the first in committing, then none.
        for fails in ("tensors" if world.global_rank == 1 else "", "manifest", ""):
            training.train(1)
            checkpointer.wait()
            Obstructed.fails, store.fails = fails == "tensors", fails == "manifest"
            training.save(checkpointer)
            report = checkpointer.wait()
            assert report is not None
            result["problems"].append(report.problem)
            result["left"].append(len(all_gather_object(store.names(), world)[0]))
        # The rest of the training goes on while a save is written.
        Obstructed.gate = threading.Event()
        at_save = training.digest()
        saved_step = training.step
        training.save(checkpointer)
        training.train(3)
        checkpointer.poll()
        result["went on"] = (training.digest() != at_save, len(heard) == 4)
        # The next save has to wait for it.
        threading.Thread(target=_let_go, args=(Obstructed.gate, world)).start()
        training.save(checkpointer)
        waited = checkpointer.wait()
        assert waited is not None
        result["waited"] = waited.stall_s > 0.2
        result["steps"] = [report.step for report in heard]
        result["kept"] = [manifest.step for manifest in committed_manifests(store)]
        if world.is_first:
            store.delete(committed_manifests(store)[0].name)
        all_gather_object(None, world)
        other = Training(world, "ddp", seed=5)
        loaded = checkpointer.load(other.state())
        assert loaded is not None
        other.restore(loaded)
        result["as it was"] = (loaded.step == saved_step, other.digest() == at_save)
        result["files"] = store.sizes(loaded.newest.name)
        result["buffers are in"] = _files_of_buffers(folder / "shared" / loaded.newest.name)
        result["misfits"] = [
            _refusal(checkpointer, Training(world, "ddp", width=7)),
            _refusal(checkpointer, Training(world, "ddp", kind="SGD")),
            _refusal(checkpointer, Training(world, "ddp"), dtype=torch.float16),
            _refusal(checkpointer, Training(world, "ddp"), extra="model.another"),
        ]
        result["unsupported"] = _unsupported(checkpointer)
    return result


def lose_mount(world: World, folder: Path) -> list[tuple[str | None, int]]:
    """Save while the folder is gone, and after it is back; return problems and numbers of checkpoints."""
    store = FolderStore(folder / "mounted")
    training = Training(world, "fsdp")
    results = []
    with Checkpointer(store) as checkpointer:
        for is_mounted in (True, False, True):
            training.train(1)
            if world.is_first and not is_mounted:
                store.folder.rename(folder / "elsewhere")
                store.folder.touch()  # nothing can be created below it
            all_gather_object(None, world)
            training.save(checkpointer)
            report = checkpointer.wait()
            assert report is not None
            if world.is_first and not is_mounted:
                store.folder.unlink()
                (folder / "elsewhere").rename(store.folder)
            all_gather_object(None, world)
            names = all_gather_object(store.names(), world)[0]
            results.append((report.problem, len(names)))
        digest = training.digest()
        training.train(1)
        loaded = checkpointer.load(training.state())
        assert loaded is not None
        training.restore(loaded)
        assert training.digest() == digest
    return results


def _let_go(gate: threading.Event, world: World) -> None:
    """Open a gate while the next save waits for it."""
    time.sleep(0.5)
    gate.set()


def _files_of_buffers(folder: Path) -> set[str]:
    buffers = (
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    )
    files = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            if not set(buffers).isdisjoint(opened.keys()):
                files.add(path.name)
    return files


def _refusal(
    checkpointer: Checkpointer, training: Training, *, dtype: Any = None, extra: str = ""
) -> str:
    state = training.state()
    if dtype is not None:
        state["model"]["layers.0.bias"] = state["model"]["layers.0.bias"].to(dtype)
    if extra:
        state["model"]["another"] = torch.zeros(2)
    try:
        checkpointer.load(state)
    except MusterError as error:
        return str(error)
    return "it was loaded"


def _unsupported(checkpointer: Checkpointer) -> list[str]:
    said = []
    for value in ({1, 2}, torch.zeros(2, dtype=torch.complex128)):
        try:
            checkpointer.save({"model": {"it": value}}, 1)
        except MusterError as error:
            said.append(error.what)
    return said


def on_disks_of_their_own(world: World, folder: Path) -> list[Any]:
    """Save as ranks of two hosts that have no disk in common; return what is said, and what is left."""
    state = Training(world, "ddp").state()
    store = FolderStore(folder / f"of-{world.global_rank}" / "saves")
    said = ""
    with Checkpointer(store) as checkpointer:
        try:
            checkpointer.check_room(state)
        except MusterError as error:
            said = str(error)
        checkpointer.save(state, 1)
        report = checkpointer.wait()
    assert report is not None
    return [said, report.problem, all_gather_object(store.names(), world)]


def damage_each(world: World, folder: Path, canary: Path) -> list[str]:
    """Damage every file of the newest checkpoint in every way; return what each load did wrong, if anything."""
    store = FolderStore(folder / "good")
    training = Training(world, "fsdp")
    wrong: list[str] = []
    with Checkpointer(store) as checkpointer:
        training.train(1)
        training.save(checkpointer)
        checkpointer.wait()
        before = training.digest()
        training.train(1)
        training.save(checkpointer)
        checkpointer.wait()
        newest = committed_manifests(store)[0]
        intact = folder / "intact"
        damaged = folder / "good" / newest.name
        if world.is_first:
            shutil.copytree(damaged, intact)
        reader = Training(world, "fsdp", seed=3)
        cases = [(file, kind) for file in sorted([*newest.files, MARKER]) for kind in DAMAGES]
        cases += [(file, "signed bomb") for file in sorted(newest.files)]
        cases += [("stray.safetensors", "copied"), (".metadata", "bomb")]
        for file, kind in cases:
            if world.is_first:
                shutil.rmtree(damaged)
                shutil.copytree(intact, damaged)
                _damage(damaged, file, kind, canary)
            all_gather_object(None, world)
            said = _load_damaged(checkpointer, reader, before, kind, file)
            wrong += [f"{file} {kind}: {said}"] if said else []
    return wrong


def _load_damaged(
    checkpointer: Checkpointer, reader: Training, before: str, kind: str, file: str
) -> str:
    try:
        loaded = checkpointer.load(reader.state())
    except MusterError as error:
        return "" if kind == "signed bomb" else str(error)
    step = 2 if file == ".metadata" else 1  # a file that nobody reads does no harm
    if loaded is None or loaded.step != step:
        return f"step {loaded and loaded.step} was loaded"
    if step == 2:
        return ""
    reader.restore(loaded)
    rejected = [finding for finding in loaded.newest.rejected if "step-00000002" in finding.what]
    return "" if reader.digest() == before and rejected else "not what was saved, or nothing said"


def _damage(folder: Path, file: str, kind: str, canary: Path) -> None:
    path = folder / file
    if kind == "copied":
        shutil.copyfile(next(folder.glob("*.safetensors")), path)
        return
    content = bytearray(path.read_bytes()) if path.exists() else bytearray()
    if kind == "gone":
        path.unlink()
        return
    if kind == "cut":
        content = content[:-1]
    elif kind == "longer":
        content += b" "
    elif kind == "empty":
        content = bytearray()
    elif kind.startswith("flipped"):
        content[{"flipped": len(content) // 2, "flipped first": 0, "flipped last": -1}[kind]] ^= 1
    else:
        content = bytearray(_bomb(canary))
    path.write_bytes(content)
    if kind == "signed bomb":  # whoever wrote it knows how to write a manifest
        manifest = read_manifest(FolderStore(folder.parent), folder.name)
        assert manifest is not None
        record = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        forged = msgspec.structs.replace(manifest, files={**manifest.files, file: record})
        (folder / MARKER).write_bytes(forged.to_json())


def _bomb(canary: Path) -> bytes:
    """Return a pickle that makes a file when it is loaded."""
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mknod, (str(canary),)

    return pickle.dumps(Bomb())


def fill_disk(world: World, folder: Path) -> list[tuple[str, int]]:
    """Save while the disk is full, and after it has room again; return problems and numbers of checkpoints."""
    store = FolderStore(folder)
    ballast = folder / "ballast"
    training = Training(world, "ddp", width=256)
    said = []
    with Checkpointer(store) as checkpointer:
        for full in (False, True, False):
            training.train(1)
            if world.is_first:
                ballast.unlink(missing_ok=True)
                if full:
                    _fill(ballast, leave_bytes=10**6)
            all_gather_object(None, world)
            training.save(checkpointer)
            report = checkpointer.wait()
            assert report is not None
            said.append((report.problem, len(all_gather_object(store.names(), world)[0])))
    return said


def _fill(ballast: Path, *, leave_bytes: int) -> None:
    free = shutil.disk_usage(ballast.parent).free
    ballast.write_bytes(bytes(free - leave_bytes))
