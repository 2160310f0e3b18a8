"""``muster run torchrun …`` and ``muster run python …``: the same run from a pasted command.

The flags of torchrun are parsed by torch's own parser (torchrun_parser.py) and become options of ``muster run``.
"""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmuster.cli import jobs, output
from torchmuster.cli.launch_options import RunOptions
from torchmuster.cli.options import NO_PYTHON
from torchmuster.config.layers import Flag
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import Impossible
from torchmuster.launch.job import parse_nodes

PARSER = Path(__file__).with_name("torchrun_parser.py")
PYTHON = re.compile(r"python[\d.]*")
TORCHRUN = ("torchrun", "torch.distributed.run")
# Flags of torchrun that cannot work here, and why.
REFUSED = {
    "numa_binding": "Muster divides the threads among the ranks; to bind them: --no-python numactl …",
    "virtual_local_rank": "ranks see all GPUs of their host, and LOCAL_RANK is the device index",
    "print_completion": "it starts no ranks",
}
# Flags of torchrun that need no word: the hosts meet at the launcher, and each run has its own id.
SILENT = ("standalone", "run_path", "rdzv_backend", "rdzv_id")


def translated(options: RunOptions) -> RunOptions:
    """Return the options of the same run without ``python`` and ``torchrun`` in front of the script."""
    command = list(options.script)
    if Path(command[0]).is_file() and "/" not in command[0]:
        return options
    if PYTHON.fullmatch(Path(command[0]).name):
        command = command[1:]
        while command[:1] == ["-u"]:  # ranks are always unbuffered
            command = command[1:]
        if not command or (command[0].startswith("-") and command[0] != "-m"):
            raise Impossible(
                f"there is no script or module after {options.script[0]}",
                why="Muster starts the Python of each rank itself, without flags",
                fix="muster run train.py; flags of Python are variables, too: --env PYTHON…=…",
            )
        if command[0] == "-m" and command[1:2] == ["torch.distributed.run"]:
            command = command[1:]
    if Path(command[0]).name in TORCHRUN:
        return _from_torchrun(options, command[1:])
    return dataclasses.replace(options, script=tuple(command))


def _parse(command: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of torchrun that were given, and the script; exit as torchrun does on a mistake."""
    result = subprocess.run(
        [sys.executable, str(PARSER), *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0 or not result.stdout.startswith("{"):
        output.print_text(result.stdout, end="")  # --help
        raise SystemExit(result.returncode)
    parsed = json.loads(result.stdout)
    return parsed["given"], parsed["script"]


def _from_torchrun(options: RunOptions, command: Sequence[str]) -> RunOptions:
    """Return the options with those of torchrun; the flags of muster override them."""
    given, script = _parse(command)
    for name, why in REFUSED.items():
        if name in given:
            raise Impossible(f"{_flag(name)} is not supported", why=why, fix="leave it out")
    if str(given.pop("node_rank", 0)) != "0":
        raise Impossible(
            "--node-rank: Muster starts the ranks of all hosts with one command",
            why="torchrun is started on every host, but muster run only on the first; it connects to the others",
            fix="on the first host: muster run --hosts a,b train.py  # over ssh; or: muster run --join "
            "--nodes 2 train.py, and here muster join",
        )
    changes: dict[str, object] = _ranks(str(given.pop("nproc_per_node", 1)))
    nodes = given.pop("nnodes", "1")
    is_several = nodes not in ("1", "1:1")
    if is_several:
        changes["nodes"] = parse_nodes(nodes)
    if "max_restarts" in given:
        changes["max_restarts"] = str(given.pop("max_restarts"))
    if "log_dir" in given:
        changes["runs"] = Path(given.pop("log_dir"))
    usual = RunOptions()
    for name in list(changes):
        if getattr(options, name) != getattr(usual, name):
            del changes[name]
    if options.num_gpus or options.gpu_ids:
        changes.pop("ranks", None)
    if "role" in given:
        changes["env"] = (*options.env, f"ROLE_NAME={given.pop('role')}")
    changes["set"] = (*_settings(given, is_several=is_several), *options.set)
    if given.pop("module", False):
        script = ["-m", *script]
    if given.pop("no_python", False):
        script = [NO_PYTHON, *script]
    ignored = [_flag(name) for name in given if name not in SILENT]
    if ignored:
        output.say(
            f"muster: without effect: {', '.join(ignored)}; all output is on the console and in the run "
            "folder's logs, and signals always reach the ranks"
        )
    changes["script"] = tuple(script)
    return dataclasses.replace(options, **changes)  # type: ignore[arg-type]  # checked by the tests


def _ranks(value: str) -> dict[str, object]:
    if value.isdecimal():
        return {"ranks": int(value)}
    if value in ("gpu", "cuda", "xpu"):
        return {"device": "gpu"}
    if value == "auto" and jobs.sees_gpus():
        return {}
    if value in ("auto", "cpu"):
        return {"device": "cpu", "ranks": usable_cores().value}
    raise Impossible(
        f"--nproc-per-node {value} is not a number of ranks",
        why="the value must be a number, gpu, cpu or auto",
        fix="--nproc-per-node 2",
    )


def _settings(given: dict[str, Any], *, is_several: bool) -> list[Flag]:
    """Take the flags of torchrun that are settings: the rendezvous and the time to stop."""
    address, _, port = given.pop("rdzv_endpoint", "").rpartition(":")
    address = given.pop("master_addr", address)
    address = given.pop("local_addr", address)
    port = str(given.pop("master_port", port))
    values = {}
    # A name is looked up differently on each host, and other hosts cannot use a loopback address.
    if is_several and address[:1].isdigit() and not address.startswith("127."):
        values["launch.address"] = address
    if port.isdecimal() and port != "0" and "standalone" not in given:
        values["distributed.master_port"] = port
    for pair in given.pop("rdzv_conf", "").split(","):
        name, _, value = pair.partition("=")
        if name in ("join_timeout", "timeout"):
            values["launch.join_timeout"] = value
    if "shutdown_timeout" in given:
        values["launch.grace"] = str(given.pop("shutdown_timeout"))
    return [Flag(flag="torchrun", path=path, text=text) for path, text in values.items()]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
