"""A rank of a trial of ``muster prove``: install the recorder, then run the script unchanged."""

from pathlib import Path

from torchmuster.launch.rank.start import run_command
from torchmuster.prove.probes import isolation
from torchmuster.prove.probes.recorder import ProofRecorder
from torchmuster.prove.records import TrialRequest


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
