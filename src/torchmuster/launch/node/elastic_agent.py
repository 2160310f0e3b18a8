"""torchrun's elastic agent for one host.

The agent and its flags are PyTorch's; this file adds four things: it is killed with the node agent, it records
which ranks failed and how, it asks the ranks to stop at most once, and it registers the rendezvous ``torchmuster``.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchmuster.launch.garbage_collection import freeze_objects
from torchmuster.launch.rank.start import die_with_parent

_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
# The one signal that torch's own handler gets, which forwards a signal each time it comes.
_LEFT_TO_TORCH = "SIGQUIT"
# The node agent kills ranks that do not stop; this is longer than any grace period.
_NEVER_KILL_S = 7 * 86400


def main(arguments: Sequence[str]) -> int:
    """Run the agent; the first argument is the file for the ranks that failed.

    With ``--warm``, the arguments come later, and the ranks are forked from this process.
    """
    die_with_parent()  # before torch is imported, which takes seconds
    from torch.distributed.elastic.multiprocessing import SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from torchmuster.launch.node import static_rendezvous, warm_agent
    from torchmuster.launch.node.rank_exits import RankExits

    if arguments[0] == warm_agent.WARM_FLAG:
        _import_for_optimizers()
        arguments, ranks = warm_agent.serve_warm(arguments[1:])
        api.get_subprocess_handler = ranks.handler  # type: ignore[assignment,attr-defined]
    static_rendezvous.register_rendezvous()
    exits = RankExits(Path(arguments[0]))
    exits.watch()
    asked = False

    def stop(number: int, _: object) -> None:
        """Stop the ranks, unless they were already asked: by an earlier signal, or because one failed."""
        nonlocal asked
        if not asked and not exits.some_failed:
            asked = True
            words = f"Process {os.getpid()} got signal: {number}"
            raise SignalException(words, signal.Signals(number))

    for name in _STOP_SIGNALS:
        signal.signal(signal.Signals[name], stop)
    # A scheduler may warn every process. A handler, because the ranks would inherit SIG_IGN.
    for name in ("SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], lambda *_: None)
    config, entrypoint, words = config_from_args(parse_args(arguments[1:]))  # type: ignore[no-untyped-call]
    config.signals_to_handle = _LEFT_TO_TORCH
    config.shutdown_timeout = _NEVER_KILL_S
    try:
        elastic_launch(config=config, entrypoint=entrypoint)(*words)
    except ChildFailedError as error:
        exits.add_all(error.failures)
        return 1
    except SignalException as error:
        exits.drop_ended_by(error.sigval)
        raise
    return 0


def _import_for_optimizers() -> None:
    """Have torch import what it imports for the first optimizer of a process, its compiler among it."""
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        freeze_objects()
