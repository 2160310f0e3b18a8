"""Choose ``strategy: auto`` by tracing, if the model's size does not show whether copies fit."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.config.settings import Settings
from torchmuster.decision import Decision
from torchmuster.devices.for_model import Strategy, states_decide
from torchmuster.train.data.batch_split import BatchSplit
from torchmuster.train.precision import Precision
from torchmuster.train.progress import progress
from torchmuster.train.world import World, all_gather_object
from torchmuster.worker.reporting import rank_zero_log

if TYPE_CHECKING:  # most runs need no plan, and should not wait for these imports
    from torchmuster.plan.strategy import Question, Spread

# The plan must not delay the start for long. The hang monitor reports ranks that wait for another
# rank after one minute.
TRACED_WITHIN_S = 45.0


def planned_strategy(
    settings: Settings,
    by_states: Decision[Strategy],
    *,
    states_bytes: int,
    memory_bytes: int,
    precision: Precision,
    portions: BatchSplit,
    world: World,
    folder: Path,
) -> Decision[Strategy]:
    """Return the strategy of a model, the same on all ranks; rank 0 traces it if needed."""
    if world.world_size == 1 or states_decide(states_bytes, memory_bytes):
        return by_states
    told = None
    if world.is_first:
        from torchmuster.plan.proof import comparison
        from torchmuster.plan.request import work_from_values
        from torchmuster.plan.strategy import Question

        question = Question(
            work=work_from_values(settings, folder=str(Path.cwd())),
            ranks=world.world_size,
            ranks_per_machine=world.local_world_size,
            states_bytes=states_bytes,
            memory_bytes=memory_bytes,
            device=world.device.type,
            precision=precision.name,
            recompute=settings.train.activation_checkpointing,
            micro_batch_size=portions.micro_batch_size,
            accumulation=portions.rounds,
        )
        decided = _traced(question, by_states, world)
        if decided.value.promise is not None:
            comparison.write_promise(folder, decided.value.promise)
        told = [decided.value.name, decided.reason]
    name, reason = all_gather_object(told, world)[0]
    return Decision(value=name, reason=reason)


def _traced(
    question: "Question", by_states: Decision[Strategy], world: World
) -> "Decision[Spread]":
    from torchmuster.plan.strategy import strategy_for
    from torchmuster.plan.tracing.cache import cache_folder
    from torchmuster.plan.tracing.tracer import Tracer

    progress.phase = "planning"  # shown by monitors while this rank waits for other processes
    rank_zero_log(
        world,
        "tracing a few layers of the model: its size alone does not show whether copies fit",
    )
    with Tracer(cache=cache_folder(), say=lambda text: rank_zero_log(world, text)) as tracer:
        limit = threading.Timer(TRACED_WITHIN_S, tracer.give_up)
        limit.start()
        try:
            return strategy_for(question, by_states, tracer.records)
        finally:
            progress.phase = ""
            limit.cancel()
