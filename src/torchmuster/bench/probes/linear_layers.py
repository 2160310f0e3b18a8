"""The matrix products of a model's linear layers, found by a forward in which no tensor has memory."""

import math
import re
from collections import Counter
from typing import Any

from torch import nn

from torchmuster.bench.matmul import Shape
from torchmuster.errors import Impossible
from torchmuster.plan.job import Candidate, Work
from torchmuster.plan.probes.building import build
from torchmuster.plan.probes.imagined_world import imagined_world, masks_of_real_runs
from torchmuster.plan.probes.live_storage import LiveStorages
from torchmuster.plan.probes.refusals import named_refusals
from torchmuster.train.strategies.sharding import ShardLayout
from torchmuster.train.weights import own_name

# nn.Linear keeps its weight as (out, in); GPT-2's layers of transformers, which are called so, as (in, out).
_KINDS = ("Linear", "Conv1D")


def linear_shapes(work: Work, micro_batch_size: int) -> tuple[Shape, ...]:
    """Return the products of one forward of a micro-batch; alike layers of a model as one, with their number."""
    counted: Counter[tuple[int, int, int, str]] = Counter()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            inner, columns = args[0].shape[-1], output.shape[-1]
            rows = math.prod(args[0].shape[:-1])
            counted[rows, inner, columns, re.sub(r"\b\d+\b", "*", own_name(name))] += 1

        return hook

    one_rank = Candidate(
        strategy="single",
        layout=ShardLayout(copies=1, shards=1),
        micro_batch_size=micro_batch_size,
    )
    seen = LiveStorages(answer=lambda _: None, on_host=True)
    nobody_else = imagined_world(1, ranks_per_machine=1, reduced=lambda bucket, ranks: None)
    with named_refusals(seen), nobody_else as world:
        built = build(work, one_rank, world)
        for name, module in built.model.named_modules():
            if type(module).__name__ in _KINDS:
                module.register_forward_hook(note(name))
        with masks_of_real_runs(packed=work.packed):
            built.loss_of(built.batch())
    if not counted:
        raise Impossible(
            "asked for the products of this model's linear layers",
            why="its forward calls no torch.nn.Linear",
            fix="leave the model out and give sizes: --sizes 1024 2048",
        )
    return tuple(
        Shape(rows=rows, inner=inner, columns=columns, layer=layer, times=times)
        for (rows, inner, columns, layer), times in counted.items()
    )
