"""FSDP2: parameters, gradients and optimizer states are sharded; a block is whole only while it computes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from torchmuster.errors import Impossible
from torchmuster.train.buffers import share
from torchmuster.train.models.blocks import repeated_blocks
from torchmuster.train.models.meta_init import is_on_meta, move_to_meta
from torchmuster.train.precision import FP32, Precision
from torchmuster.train.strategies import gradients
from torchmuster.train.strategies.gradients import GradientNorm
from torchmuster.train.strategies.sharding import Sharding, ShardLayout, lay_out
from torchmuster.train.strategies.states import (
    take_shards_of_rank_0,
    take_values_of_rank_0,
    whole_values,
)
from torchmuster.train.strategies.strategy import Strategy
from torchmuster.train.world import World, all_gather_object

# Their running means stay in fp32, and torch has no kernel for lower-precision weights with fp32
# means.
_WITH_RUNNING_MEANS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Fsdp(Strategy):
    """Shards the model over the ranks with torch's ``fully_shard``: each repeated block, then the rest.

    Blocks are gathered and computed in ``precision``; shards, sums of gradients and the optimizer
    keep the model's own dtype, and so do the weights of batch normalization. It works together with
    the loop's ``autocast``, which then finds most tensors in the right dtype already. A model that
    has values on rank 0 only (``meta_init.py``) gets its shards here.
    """

    name = "fsdp"

    def __init__(
        self,
        world: World,
        *,
        sharding: Sharding | None = None,
        precision: Precision = FP32,
    ) -> None:
        super().__init__(world)
        self._sharding = sharding or Sharding()
        self._precision = precision
        # With the names of buffers that are broadcast before each step.
        self._prepared: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
        self._shard_group: dist.ProcessGroup | None = None  # known once a model is prepared
        if self._sharding.cpu_offload and precision.needs_scaler and world.device.type != "cpu":
            raise Impossible(
                f"fsdp_cpu_offload was requested with precision {precision.name}",
                why="the loss scale checks the offloaded gradients in host memory, "
                f"and {world.backend} cannot communicate the result from there",
                fix="use precision bf16 or fp32, or remove fsdp_cpu_offload",
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model block by block."""
        whole = None
        if any(all_gather_object(is_on_meta(model), self._world)):
            whole = whole_values(model, self._world)
            move_to_meta(model)
        else:
            take_values_of_rank_0(model, self._world)
        mesh = _mesh(lay_out(self._sharding, self._world), self._world)
        self._shard_group = mesh.get_group("shard")
        keep_whole = self._sharding.kind == "shard_grad_op"
        if self._precision.compute is not torch.float32:
            for norm in _norms_with_running_means(model):  # small, so they may stay unsharded
                self._shard(norm, mesh, precision=FP32, reshard_after_forward=False)
        for module in _modules_of_another_dtype(model):
            self._shard(module, mesh, reshard_after_forward=False)
        for block in _independent_blocks(model):
            self._shard(block, mesh, reshard_after_forward=not keep_whole)
        # The rest of the model is needed first and last, so torch keeps it gathered in between.
        self._shard(model, mesh, reshard_after_forward=False)
        if whole is not None:
            home = self._world.device
            if self._sharding.cpu_offload:
                home = torch.device("cpu")
            take_shards_of_rank_0(model, whole, self._world, home=home)
        self._prepared[model] = _running_buffers(model)
        return model

    def _shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool,
        precision: Precision | None = None,
    ) -> None:
        compute = (precision or self._precision).compute
        mixed = MixedPrecisionPolicy()
        if compute is not torch.float32:
            mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if self._sharding.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self._world.device.type != "cpu")
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mixed,
            offload_policy=offload,
        )

    def begin_step(self, model: nn.Module) -> None:
        """Broadcast rank 0's running means and other buffers to all ranks, as DDP does."""
        share([model.get_buffer(name) for name in self._prepared.get(model, ())], self._world)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep this backward's full gradients on this rank."""
        sharded = cast(FSDPModule, model)
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    @contextmanager
    def accumulating(self, model: nn.Module) -> Iterator[None]:
        """Shard gradients after every backward, to save memory; replicas reduce only at the end."""
        sharded = cast(FSDPModule, model)
        sharded.set_requires_all_reduce(False)
        try:
            yield
        finally:
            sharded.set_requires_all_reduce(True)

    def measure_gradients(self, parameters: Sequence[nn.Parameter], *, norm: bool) -> GradientNorm:
        """Measure the gradient shards of all ranks."""
        assert self._shard_group is not None, "prepare() comes first"
        return gradients.measure_gradient_shards(
            parameters, self._world.device, self._shard_group, norm=norm
        )


def _running_buffers(model: nn.Module) -> list[str]:
    """Return the saved floating-point buffers; not counters or derived tables."""
    saved = model.state_dict().keys()
    names = []
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            names.append(name)
    return names


def _norms_with_running_means(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, _WITH_RUNNING_MEANS) and module.affine and module.track_running_stats:
            yield module


def _modules_of_another_dtype(model: nn.Module) -> list[nn.Module]:
    """Return the modules inside whose trained parameters differ in dtype from most others.

    FSDP reduces the gradients of a group in one dtype. Next to a base model in bfloat16, peft's LoRA
    matrices are float32, but layers that it trains whole are bfloat16. Frozen parameters do not matter.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtypes = Counter(parameter.dtype for parameter in trained)
    if len(dtypes) < 2:
        return []
    usual = dtypes.most_common(1)[0][0]
    different = {id(parameter) for parameter in trained if parameter.dtype is not usual}
    modules = []
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if module is not model and own & different:
            modules.append(module)
    return modules


def _mesh(layout: ShardLayout, world: World) -> DeviceMesh:
    kind = world.device.type
    if layout.copies == 1:
        return init_device_mesh(kind, (layout.shards,), mesh_dim_names=("shard",))
    shape = (layout.copies, layout.shards)
    return init_device_mesh(kind, shape, mesh_dim_names=("copy", "shard"))


def _independent_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that share no parameter with the rest of the model.

    Tied parameters must be sharded together, so blocks that share one stay with the rest.
    """
    uses = _uses(model)
    blocks = []
    for block in repeated_blocks(model):
        if all(uses[parameter] == count for parameter, count in _uses(block).items()):
            blocks.append(block)
    return blocks


def _uses(model: nn.Module) -> Counter[int]:
    """Return in how many places of a model each parameter is, by its id."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(parameter) for parameter in module.parameters(recurse=False))
    return uses
