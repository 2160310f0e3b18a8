"""torchrun's elastic agent for one host.

The agent and its flags are PyTorch's; this file adds three things: it is killed with the node agent, it records
which ranks failed and how, and it registers the rendezvous ``torchmuster``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.launch.rank.start import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Run the agent; the first argument is the file for the ranks that failed."""
    die_with_parent()  # before torch is imported, which takes seconds
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from torchmuster.launch.node import static_rendezvous
    from torchmuster.launch.node.rank_exits import RankExits

    static_rendezvous.register_rendezvous()
    exits = RankExits(Path(arguments[0]))
    exits.watch()
    try:
        run(parse_args(arguments[1:]))  # type: ignore[no-untyped-call]  # torch's own
    except ChildFailedError as error:
        exits.add_all(error.failures)
        return 1
    except SignalException as error:
        exits.drop_ended_by(error.sigval)
        raise
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        freeze_objects()
