"""A rank of a profiled training run: install the recorder, then run the script unchanged."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import msgspec
import torch.distributed as dist

from torchmuster.launch.local_ranks import leave_answer
from torchmuster.profile.facts import ProfileRequest
from torchmuster.profile.probes.recorder import Finished, StepRecorder


def main() -> None:
    """Read the request, run the script up to the last requested step, and write the facts."""
    request_file, answers = sys.argv[1:]
    request = msgspec.json.decode(Path(request_file).read_bytes(), type=ProfileRequest)
    recorder = StepRecorder(request)
    recorder.install()
    program, *arguments = request.command
    if request.with_run_folder:
        arguments += ["--run-folder", str(Path(request.into) / "run")]
    sys.argv = [program, *arguments]
    ended_early = False
    try:
        if request.module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).absolute().parent)
            runpy.run_path(program, run_name="__main__")
    except Finished:
        ended_early = True
    except SystemExit as end:
        if end.code:
            raise
    facts = recorder.facts()
    if ended_early and dist.is_initialized():
        # No rank exits while another still needs it.
        dist.barrier()
        dist.destroy_process_group()
    leave_answer(answers, facts.rank, msgspec.json.encode(facts).decode())
    for worker in multiprocessing.active_children():
        worker.terminate()  # of a loader that the script did not close
    sys.stdout.flush()
    sys.stderr.flush()
    # Groups, threads and workers of an interrupted script may block Python's exit.
    os._exit(0)


if __name__ == "__main__":
    main()
