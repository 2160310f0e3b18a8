"""How ``strategy: auto`` is decided on ranks whose memory is made up."""

import os
from pathlib import Path

from torchmuster.config.settings import Data, Model, Settings
from torchmuster.decision import Decision
from torchmuster.train.data.batch_split import BatchSplit
from torchmuster.train.precision import FP32
from torchmuster.train.progress import progress
from torchmuster.train.world import World
from torchmuster.worker import planned


def spread(world: World, folder: str, states_bytes: int, memories: list[int]) -> list[list[str]]:
    """Return what is decided for each size of memory, and why; the first rank tells where it is meanwhile."""
    phases: set[str] = set()
    planned.say = lambda world, text: phases.add(progress.phase)  # type: ignore[attr-defined]
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = folder
    planned.TRACED_WITHIN_S = 150.0  # the machine that runs the tests may be busy
    settings = Settings(model=Model(build="own:model"), data=Data(dataset="own:data"))
    found = []
    for number, memory_bytes in enumerate(memories):
        run = Path(f"run-{number}")
        run.mkdir(exist_ok=True)
        decided = planned.planned_strategy(
            settings,
            Decision(value="ddp", reason="ddp: by its states"),
            states_bytes=states_bytes,
            memory_bytes=memory_bytes,
            precision=FP32,
            portions=BatchSplit(ranks=world.world_size, global_batch_size=8, micro_batch_size=4),
            world=world,
            folder=run,
        )
        found.append([decided.value, decided.reason])
        assert progress.phase == ""
    assert phases == ({"planning"} if world.is_first else set())
    return found
