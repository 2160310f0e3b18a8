"""A rank of a trial of ``muster prove``: install the recorder, then run the script unchanged."""

import socket
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchmuster.launch.rank.start import run_command
from torchmuster.prove.probes import isolation
from torchmuster.prove.probes.recorder import ProofRecorder
from torchmuster.prove.records import TrialRequest


def serve_store(listening: socket.socket) -> TCPStore:
    """Serve the store at which the ranks meet, on a socket that is already open."""
    host, port = listening.getsockname()
    descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def run_recorded(request: TrialRequest) -> None:
    """Run the script of a trial in this process."""
    isolation.allow_writes_only((request.folder, request.into))
    recorder = ProofRecorder(request)
    recorder.install()
    command = [*request.command]
    if request.with_run_folder:
        command += ["--run-folder", str(Path(request.folder) / "run")]
    try:
        run_command(command, module=request.module)
    finally:
        recorder.end()
