"""Launching a job from a command, and staying with it."""

import socket

from torchmuster.cli import job_flags
from torchmuster.launch.channel import Transport
from torchmuster.launch.spec import JobSpec
from torchmuster.runfolder import RunFolder


def stay(spec: JobSpec, transport: Transport, run: RunFolder) -> int:
    """Launch a job and show how it goes until it is over."""
    from torchmuster.launch.launcher import launch

    return launch(spec, transport, run, job_flags.voice_for)


def transport_for(spec: JobSpec, python: str) -> Transport:
    """Return the way to the machines of a job: ssh, or none but this one."""
    if spec.hosts:
        from torchmuster.launch.ssh import SshTransport

        return SshTransport(spec.hosts, python, lost_after_s=spec.limits.lost_after_s)
    from torchmuster.launch.local import LocalTransport

    return LocalTransport(socket.gethostname())
