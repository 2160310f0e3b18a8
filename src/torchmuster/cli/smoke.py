"""``muster smoke``: run a minimal program that tests the communication between ranks."""

import argparse
import sys

from torchmuster.cli import job_flags, parsers, slurm_run
from torchmuster.cli.launching import stay, transport_for
from torchmuster.cli.scripts import Script
from torchmuster.runfolder import create_run_folder

PROGRAM = "torchmuster.launch.probes.smoke"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``muster smoke``."""
    parser.description = (
        f"{parser.description}\nEach rank prints its number, device and host name, and runs an "
        "all-gather and "
        f"a barrier.\nThe same under torchrun: torchrun --nproc-per-node 2 -m {PROGRAM}"
    )
    parsers.show_examples(
        parser,
        [
            "muster smoke --ranks 2            two ranks on this machine",
            "muster smoke --hosts a,b:2        three ranks on two hosts",
        ],
    )
    job_flags.add_machine_flags(parser)
    job_flags.add_host_flags(job_flags.add_rendezvous_flags(parser))
    job_flags.add_run_flags(parser)
    parser.set_defaults(run=_run_smoke)


def _run_smoke(options: argparse.Namespace) -> int:
    resolved = job_flags.settings_of(options)
    script = Script(command=(PROGRAM,), module=True)
    spec = job_flags.job_from(options, resolved, script)
    python = resolved.settings.launch.remote_python or sys.executable
    transport = slurm_run.transport_inside(spec) or transport_for(spec, python)
    return stay(spec, transport, create_run_folder(options.runs, spec.name))
