"""``muster gpus``: the accelerators of this machine, who uses them, how they are joined."""

import argparse
import os
import time

from torchmuster.cli import gpus_pick, output, parsers
from torchmuster.devices import snapshot
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Node
from torchmuster.devices.readers import nvml
from torchmuster.devices.request import Claim
from torchmuster.devices.visibility import visible
from torchmuster.errors import ExitCode
from torchmuster.finding import exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster gpus`` and its action ``pick``."""
    parsers.show_examples(
        parser,
        [
            "muster gpus              one look",
            "muster gpus --watch      a look every second, until Ctrl-C",
            "muster gpus --links      which GPUs are joined by NVLink, which by PCIe",
            "muster gpus pick --num 2 -- python train.py    run on two free ones",
        ],
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    parsers.add_json_flag(how)
    parser.add_argument(
        "--interval",
        type=parsers.interval,
        default=1.0,
        metavar="SECONDS",
        help="between looks (1)",
    )
    parser.add_argument("--links", action="store_true", help="show how the GPUs are joined")
    parser.add_argument("--uuids", action="store_true", help="show each GPU's UUID")
    parser.set_defaults(run=_run)
    actions = parser.add_subparsers(title="more", metavar="ACTION")
    gpus_pick.add_parser(actions)


def _run(options: argparse.Namespace) -> ExitCode:
    if options.watch:
        return _watch(options)
    node, held = _look()
    shown = visible(node.accelerators, os.environ)
    if options.json:
        from torchmuster.devices.as_json import node_as_json

        output.print_json(node_as_json(node, shown, held))
    else:
        from torchmuster.cli import gpus_table

        gpus_table.show(node, shown, held, links=options.links, uuids=options.uuids)
    return exit_code((*node.findings, *shown.findings))


def _look() -> tuple[Node, dict[str, Claim]]:
    node = snapshot.take_with_history()
    return node, Claims.here(os.environ).glance(one.uuid for one in node.accelerators).claimed


def _watch(options: argparse.Namespace) -> ExitCode:
    from torchmuster.cli import gpus_table

    with nvml.kept_open(), gpus_table.live(links=options.links, uuids=options.uuids) as update:
        while True:
            node, held = _look()
            update(node, visible(node.accelerators, os.environ), held)
            time.sleep(options.interval)
