"""What was typed after the script arrives in the script, whatever torchrun does to command lines."""

from pathlib import Path

import pytest
from torch.distributed.elastic.utils.api import macros

from torchmuster.launch import protocol
from torchmuster.launch.node import engines

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("typed", ["$HOME", "$$", "${local_rank}", "a$", "--x=$1,$$2", "plain"])
def test_torchrun_gives_back_what_was_typed(typed: str) -> None:
    prepare = protocol.Prepare(
        run_id="r",
        token="t",
        command=("train.py", typed),
        module=False,
        folder="/",
        device="cpu",
        ranks=1,
    )
    start = protocol.Start(
        attempt=0,
        node_rank=0,
        nodes=1,
        first_rank=0,
        world_size=1,
        backend="muster",
        endpoint="127.0.0.1:1",
        address="127.0.0.1",
        port=1,
        local_address="127.0.0.1",
        interface=None,
        timeout_s=1.0,
        max_restarts=0,
    )
    folder = Path("/tmp/$odd")
    share = engines.NodeShare(prepare=prepare, start=start, ranks=1, logs=folder, records=folder)
    words = engines.agent_command(share)
    worker = words[words.index("--no-python") + 1 :]
    assert macros.substitute(worker, "3") == engines.rank_command(share)
