"""The arguments of ``torchmuster.worker``, readable without torch.

The worker reads them, and so does a machine that joined by a code before it starts the worker.
"""

import argparse
from pathlib import Path

from torchmuster.config.layers import Flag


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the worker's arguments to a parser."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of settings")
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument(
        "--run-folder",
        type=Path,
        metavar="DIR",
        help="where checkpoints, metrics and weights go; a run that is there goes on; else runs/…",
    )


def _setting(text: str) -> Flag:
    path, _, value = text.partition("=")
    return Flag(flag=f"--set {path}", path=path, text=value)
