"""A rank of a training that is profiled: the recorder at its doors, then the script as if nothing had happened."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import msgspec
import torch.distributed as dist

from torchmuster.bench.probes.step_recorder import Finished, StepRecorder
from torchmuster.bench.profile.recording import ProfileRequest, write_facts
from torchmuster.plan.proof.fresh_ranks import leave_answer


def main() -> None:
    """Read what is asked for, run the script up to its last wanted step, and leave the facts."""
    request, answers = sys.argv[1:]
    asked = msgspec.json.decode(Path(request).read_bytes(), type=ProfileRequest)
    recorder = StepRecorder(asked)
    recorder.install()
    program, *words = asked.command
    if asked.with_run_folder:
        words += ["--run-folder", str(Path(asked.into) / "run")]
    sys.argv = [program, *words]
    ended_early = False
    try:
        if asked.module:
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
        # Nobody leaves while another still has to hear from it.
        dist.barrier()
        dist.destroy_process_group()
    write_facts(Path(asked.into), facts)
    leave_answer(answers, facts.rank, str(len(facts.steps)))
    for worker in multiprocessing.active_children():
        worker.terminate()  # of a loader that the script has not come to close
    sys.stdout.flush()
    sys.stderr.flush()
    # A script that was left in its middle has groups, threads and workers that may hold up Python's own end.
    os._exit(0)


if __name__ == "__main__":
    main()
