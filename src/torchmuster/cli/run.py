"""``muster run``: start a torchrun script on one or more hosts, and follow it."""

import argparse
import sys
from pathlib import Path

from torchmuster.cli import job_flags, joined_hosts, node_group, parsers, slurm_run
from torchmuster.cli.launching import start
from torchmuster.cli.scripts import script_from
from torchmuster.errors import Impossible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster run``."""
    parser.usage = "muster run [options] script.py [the script's own arguments]"
    parser.description = (
        f"{parser.description}\nA script for torchrun needs no change. Each rank gets its RANK, "
        "its log and "
        "its devices;\nif a rank fails, all others are stopped and its error is shown. Flags of "
        "torchrun, such as\n--nproc-per-node 2, and whole commands of torchrun and python work as well."
    )
    parsers.show_examples(
        parser,
        [
            "muster run --num-gpus 2 train.py --lr 1e-4    two free GPUs of this machine, claimed",
            "muster run --device cpu --ranks 2 train.py    two ranks on the CPU",
            "muster run --hosts a,b:4,c train.py           three hosts over ssh",
            "muster run --join train.py                    this machine, and one that joins with a code",
            "muster run --slurm --nodes 2 --sbatch '--gpus-per-node=8' train.py    as a Slurm job",
            "muster run --detach train.py                  run in the background",
            "muster run --dry-run train.py                 show what would be started",
            "muster run torchrun --nproc-per-node 2 train.py    a pasted torchrun command",
        ],
    )
    job_flags.add_machine_flags(parser)
    many = job_flags.add_rendezvous_flags(parser)
    job_flags.add_host_flags(many)
    joined_hosts.add_flags(many)
    job_flags.add_spares_flag(many)
    slurm_run.add_flags(parser)
    when = job_flags.add_run_flags(parser)
    job_flags.add_unattended_flags(when)
    job_flags.add_resume_flag(when)
    when.add_argument("--detach", action="store_true", help="run in the background")
    when.add_argument("--dry-run", action="store_true", help="show what would be started, and exit")
    when.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_run, command=None)


def _run_run(options: argparse.Namespace) -> int:
    group = node_group.take_group(options)
    if group is not None and (code := node_group.ended_before(group, options.runs)) is not None:
        return code
    if group is not None and group.node_rank > 0:
        return node_group.serve(group, options)
    joined_hosts.take_flags(options)
    script = script_from(options, Path.cwd())
    if options.json and not options.dry_run:
        raise Impossible(
            "--json works only with --dry-run",
            why="a run prints the output of its ranks",
            fix="leave out --json; for the state of runs as JSON: muster runs --json",
        )
    resolved = job_flags.settings_of(options)
    spec = job_flags.job_from(options, resolved, script)
    python = resolved.settings.launch.remote_python or sys.executable
    return start(options, spec, python, group=group)
