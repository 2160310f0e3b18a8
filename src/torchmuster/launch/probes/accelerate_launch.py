"""Print what ``accelerate launch`` would start with these arguments, as JSON; start nothing.

Accelerate itself reads its flags and its settings file; only the calls with which it starts processes are
replaced: calls that start torchrun or a single process are recorded, and all others are refused.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed.run as torchrun
from accelerate.commands import launch


def accelerate_launch(words: list[str]) -> dict[str, Any]:
    """Return the variables, torchrun's settings and the script of ``accelerate launch``."""
    parser = launch.launch_command_parser()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = parser.parse_args(words)
    except SystemExit:
        known = vars(parser.parse_args(["script.py"]))
        return {"error": (said.getvalue().strip().splitlines() or [""])[-1], "known": [*known]}
    started: dict[str, Any] = {"threads": args.num_cpu_threads_per_process, "torchrun": {}}
    before = dict(os.environ)

    def take_torchrun(given: Any) -> None:
        usual = vars(torchrun.get_args_parser().parse_args(["script.py"]))
        changed = {key: value for key, value in vars(given).items() if value != usual.get(key)}
        started.update(torchrun=changed, environment=dict(os.environ), command=[])

    def take_process(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        started.update(environment=env, command=command)
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    torchrun.run = take_torchrun
    launch.subprocess = SimpleNamespace(Popen=take_process)
    _refuse_other_launchers()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            launch.launch_command(args)
    except Exception as error:  # whatever accelerate refuses
        return {"error": f"{type(error).__name__}: {error}"}
    environment = started.pop("environment", {})
    return started | {
        "environment": {k: v for k, v in environment.items() if before.get(k) != v},
        "num_processes": args.num_processes,
        "num_machines": args.num_machines,
        "machine_rank": args.machine_rank,
        "module": bool(args.module),
        "no_python": bool(args.no_python),
        "script": [args.training_script, *args.training_script_args],
    }


def _refuse_other_launchers() -> None:
    """Replace what starts something else: on TPUs, on SageMaker, or with DeepSpeed's own launcher."""
    prepare_deepspeed = launch.prepare_deepspeed_cmd_env

    def refuse(what: str) -> Callable[[Any], None]:
        def launcher(*_: Any) -> None:
            raise ValueError(f"Muster cannot start {what}")

        return launcher

    def prepared(args: Any) -> Any:
        command, environment = prepare_deepspeed(args)
        if command:
            raise ValueError(
                f"Muster does not support DeepSpeed's launcher {args.deepspeed_multinode_launcher}; "
                "choose --deepspeed_multinode_launcher standard"
            )
        return command, environment

    launch.tpu_launcher = launch.tpu_pod_launcher = refuse("processes on TPUs")
    launch.sagemaker_launcher = refuse("jobs on SageMaker")
    launch.prepare_deepspeed_cmd_env = prepared


if __name__ == "__main__":
    print(json.dumps(accelerate_launch(sys.argv[1:])))
