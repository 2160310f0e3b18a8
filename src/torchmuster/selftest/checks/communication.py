"""Checks of communication: values of collectives, hangs, flight recorders, signals, several hosts."""

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchmuster.checkpoints.local import FolderStore
from torchmuster.checkpoints.manifest import committed_manifests
from torchmuster.errors import ExitCode, MusterError
from torchmuster.launch.hangs.flight_recorder import (
    EVERYBODY,
    analyse_flight_records,
    groups_of,
    read_flight_record,
)
from torchmuster.launch.history import evidence, node_records
from torchmuster.runfolder import RunFolder, list_runs
from torchmuster.selftest.check import Check, Facts, NotHere, Outcome, Place, muster_command

_PROGRAM = "communication"


def ranks_flags(place: Place, ranks: int) -> tuple[str, ...]:
    """Return the flags of a command that starts this many ranks on the devices of the self-test."""
    if place.device == "cpu":
        return "--device", "cpu", "--ranks", str(ranks)
    return "--device", "gpu", "--num-gpus", str(ranks)


def _several_ranks(place: Place) -> int:
    """Return how many ranks a small script runs on: all GPUs, or two processes."""
    if place.ranks < 2:
        raise NotHere("needs 2 GPUs")
    return 2 if place.device == "cpu" else place.ranks


_OPERATIONS = ("all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all")


def _collectives(place: Place, planted: bool) -> Facts:
    ranks = _several_ranks(place)
    return {"ranks": place.on_ranks(_PROGRAM, "exact-values", planted=planted, ranks=ranks)}


def judge_collectives(facts: Facts) -> Outcome:
    """All values of all collectives are right on all ranks."""
    ranks: list[Facts] = facts["ranks"]
    wrong = {
        (name, rank): int(one["wrong"])
        for rank, answer in enumerate(ranks)
        for name, one in answer["operations"].items()
        if one["wrong"]
    }
    missing = [
        f"{name} on rank {rank}"
        for rank, answer in enumerate(ranks)
        for name in _OPERATIONS
        if not answer["operations"].get(name, {}).get("compared")
    ]
    compared = sum(int(one["compared"]) for one in _operations(ranks))
    said = f"{compared:,} values of {', '.join(ranks[0]['operations'])} are exact on {len(ranks)} ranks"
    if missing:
        said = f"not run: {', '.join(missing)}"
    elif wrong:
        said = "wrong values: " + ", ".join(
            f"{count} of {name} on rank {rank}" for (name, rank), count in wrong.items()
        )
    return Outcome(
        confirmed=not wrong and not missing,
        says=f"{said} ({ranks[0]['backend']})",
        figures={
            "ranks": len(ranks),
            "compared": compared,
            "wrong": sum(wrong.values()),
            "seconds": max(_seconds(answer) for answer in ranks),
        },
    )


def _operations(ranks: Sequence[Facts]) -> Iterator[Facts]:
    for answer in ranks:
        yield from answer["operations"].values()


def _seconds(answer: Facts) -> float:
    return float(sum(one["seconds"] for one in answer["operations"].values()))


def _p2p_off(place: Place, planted: bool) -> Facts:
    folder = place.scratch()
    environment = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}
    environment["NCCL_DEBUG_FILE"] = str(folder / "nccl.%h.%p")
    if not planted:
        environment["NCCL_P2P_DISABLE"] = "1"
    ranks = place.on_ranks(_PROGRAM, "exact-values", planted=False, environment=environment)
    logs = "".join(one.read_text(errors="replace") for one in folder.iterdir())
    found = transports_in(logs)
    if planted and "P2P" not in found:
        raise NotHere("NCCL uses no P2P between these GPUs, so the fault changes nothing")
    return {"ranks": ranks, "transports": found}


def transports_in(log: str) -> dict[str, int]:
    """Count the channels of a log of NCCL by transport: P2P, SHM, NET."""
    found: dict[str, int] = {}
    for name in re.findall(r"\bvia ([A-Z0-9]+)", log):
        found[name] = found.get(name, 0) + 1
    return found


def judge_p2p_off(facts: Facts) -> Outcome:
    """Without P2P the values are right, and NCCL's log shows that it uses other transports."""
    values = judge_collectives(facts)
    transports: Mapping[str, int] = facts["transports"]
    shown = ", ".join(f"{name} {count}" for name, count in transports.items()) or "none"
    return Outcome(
        confirmed=values.confirmed and bool(transports) and "P2P" not in transports,
        says=f"{values.says}; channels in NCCL's log: {shown}",
        figures={**values.figures, **{f"channels_{name}": n for name, n in transports.items()}},
    )


# Muster waits longer for a rank that sleeps before the 8th collective, when connections are new.
_HANGS_IN = 12
_SCRIPT_THAT_HANGS = """\
import os, sys, time
import torch
import torch.distributed as dist

device = torch.device("cpu")
if sys.argv[1] == "gpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    device = torch.accelerator.current_accelerator()
dist.init_process_group(dist.get_default_backend_for_device(device))
sleeper = int(sys.argv[2]) % dist.get_world_size()
for number in range(1, 21):
    if number == int(sys.argv[3]) and dist.get_rank() == sleeper:
        with open("asleep", "w") as file:
            file.write(str(time.time()))
        time.sleep(3600)
    value = torch.ones(8, device=device)
    dist.all_reduce(value)
    value.sum().item()
"""
_END_HANGS_AFTER_S = 25
_REPORTED_WITHIN_S = 60.0


def _hang(place: Place, planted: bool) -> Facts:
    ranks, folder = _several_ranks(place), place.scratch()
    (folder / "hanging.py").write_text(_SCRIPT_THAT_HANGS, encoding="utf-8")
    sleeper = "0" if planted else "-1"
    place.muster(
        "run", *ranks_flags(place, ranks), "--grace", "2s",
        "--end-hangs-after", f"{_END_HANGS_AFTER_S}s",
        "hanging.py", place.device, sleeper, str(_HANGS_IN),
        folder=folder,
        accepted=(ExitCode.FAILED,),
    )  # fmt: skip
    explained = json.loads(place.muster("explain", "--json", folder=folder, accepted=(0, 1)))
    cause = next(one for one in explained["findings"] if one["status"] == "failure")
    hangs = evidence.read_hangs(_only_run(folder))
    begun = float((folder / "asleep").read_text(encoding="utf-8"))
    found: Facts = {
        "sleeps": ranks - 1,
        "ranks": ranks,
        "cause": cause["name"],
        "named": named_rank(cause["what"]),
        "reported_after_s": hangs[0].at_unix_s - begun if hangs else None,
        "progress": {},
    }
    for rank, dump in (evidence.dumps_in(hangs[0].folder) if hangs else {}).items():
        group = groups_of(dump).get(EVERYBODY)
        if group is not None and group.last is not None:
            waits = group.waits_in
            found["progress"][str(rank)] = {
                "last": group.last.seq,
                "waits_in": None if waits is None else [waits.op.replace("_", ""), waits.seq],
            }
    return found


def named_rank(text: str) -> int | None:
    """Return the rank that the report of a hang begins with."""
    found = re.match(r"rank (\d+) ", text)
    return int(found[1]) if found else None


def judge_hang(facts: Facts) -> Outcome:
    """The launcher names the rank that sleeps, and the others wait in the collective after its last one."""
    progress, sleeps = facts["progress"], facts["sleeps"]
    own = progress.get(str(sleeps), {"last": 0, "waits_in": None})
    others = [progress.get(str(rank)) for rank in range(facts["ranks"]) if rank != sleeps]
    expected = ["allreduce", own["last"] + 1]
    wait = all(one is not None and one["waits_in"] == expected for one in others)
    after_s = facts["reported_after_s"]
    soon = after_s is not None and after_s <= _REPORTED_WITHIN_S
    named = "no rank" if facts["named"] is None else f"rank {facts['named']}"
    when = "never" if after_s is None else f"after {after_s:.0f} s"
    waiting = (
        f"the other ranks wait in all_reduce number {expected[1]}"
        if wait
        else f"the recorded collectives do not show that the others wait for rank {sleeps}"
    )
    return Outcome(
        confirmed=facts["named"] == sleeps and facts["cause"] == "rank-idle" and wait and soon,
        says=f"rank {sleeps} hangs; the finding {facts['cause']} names {named}, {when}; {waiting}",
        figures={"ranks": facts["ranks"]} | ({} if after_s is None else {"reported_s": after_s}),
    )


def _only_run(folder: Path) -> RunFolder:
    runs = list_runs(folder / "runs")
    if len(runs) != 1:
        raise MusterError(f"expected one run in the folder of this check, found {len(runs)}")
    return runs[0]


# What launch/rank/stack.py and launch/hangs/flight_recorder.py read.
_FIELDS = (
    *("process_group", "collective_seq_id", "profiling_name", "input_sizes", "input_dtypes"),
    *("is_p2p", "state", "retired", "time_created_ns", "thread_id"),
)
_RAS_PORT = 28028
_RAS_SINCE = [2, 24]


def _flight_recorder(place: Place, planted: bool) -> Facts:
    ranks = _several_ranks(place)
    port, environment = _ras_port()
    answers = place.on_ranks(
        _PROGRAM,
        "recorded-training",
        planted=planted,
        ranks=ranks,
        ras_port=port,
        environment=environment,
    )
    texts = [str(one["dump"]) for one in answers]
    if planted:
        texts = [one.replace('"collective_seq_id"', '"sequence_id"') for one in texts]
    dumps = {rank: read_flight_record(text) for rank, text in enumerate(texts)}
    return {
        "backend": answers[0]["backend"],
        "nccl": answers[0].get("nccl"),
        "ras": None if "ras" not in answers[0] else ras_ranks(answers[0]["ras"]),
        "ranks": [_recorded(dump) for dump in dumps.values()],
        "findings": [one.name for one in analyse_flight_records(dumps)],
    }


def _ras_port() -> tuple[int, dict[str, str]]:
    """Return the port of NCCL's RAS: its usual one, or a free one if another job uses that."""
    with socket.socket() as probe:
        try:
            probe.bind(("localhost", _RAS_PORT))
        except OSError:
            probe.bind(("localhost", 0))
            port = int(probe.getsockname()[1])
            return port, {"NCCL_RAS_ADDR": f"localhost:{port}"}
    return _RAS_PORT, {}


def ras_ranks(answer: str) -> int | None:
    """Return how many processes NCCL's RAS counts in its job summary; None if it does not say."""
    summary = answer.partition("Job summary")[2]
    # Nodes, processes per node, GPUs per process, processes, GPUs.
    row = re.search(r"^\s*\d+\s+[\d-]+\s+[\d-]+\s+(\d+)\s+\d+\s*$", summary, re.MULTILINE)
    return int(row[1]) if row else None


def _recorded(dump: Mapping[str, Any]) -> Facts:
    entries = [one for one in dump.get("entries", ()) if isinstance(one, dict)]
    group = groups_of(dump).get(EVERYBODY)
    calls = [] if group is None else list(group.calls.values())
    return {
        "entries": len(entries),
        "missing": [name for name in _FIELDS if any(name not in one for one in entries)],
        "collectives": len(calls),
        "last": max((one.seq for one in calls), default=0),
        "finished": sum(one.done for one in calls),
        "with_shapes": sum(bool(one.shapes) for one in calls),
    }


def judge_flight_recorder(facts: Facts) -> Outcome:
    """Every field that we read is there, all ranks have the same collectives, and RAS counts all ranks."""
    ranks: list[Facts] = facts["ranks"]
    first = ranks[0]
    missing = sorted({name for one in ranks for name in one["missing"]})
    same = all(
        (one["collectives"], one["last"]) == (first["collectives"], first["last"]) for one in ranks
    )
    read = all(one["collectives"] > 0 and one["with_shapes"] > 0 for one in ranks)
    finished = all(one["finished"] == one["collectives"] for one in ranks)
    has_ras = facts["nccl"] is not None and facts["nccl"][:2] >= _RAS_SINCE
    counted = facts["ras"] == len(ranks) or not has_ras
    said = [f"rank 0 recorded {first['collectives']} collectives ({facts['backend']})"]
    said += [f"fields that are missing: {', '.join(missing)}"] if missing else []
    said += [] if same else ["the ranks recorded different numbers of collectives"]
    said += [] if read else ["no collective could be read on some rank"]
    said += [] if finished else ["some collectives are not marked as finished"]
    said += [f"findings: {', '.join(facts['findings'])}"] if facts["findings"] else []
    if has_ras:
        said.append(
            f"RAS counts {facts['ras']} of {len(ranks)} ranks"
            if facts["ras"]
            else "RAS gave no count"
        )
    return Outcome(
        confirmed=not missing and same and read and finished and counted and not facts["findings"],
        says="; ".join(said),
        figures={"ranks": len(ranks), "collectives": first["collectives"]}
        | ({"ras_ranks": facts["ras"] or 0} if has_ras else {}),
    )


_SIGUSR1_STEPS = 200
_SIGUSR1_CONFIG = f"""\
model: {{build: "own:model", loss: cross_entropy}}
data: {{dataset: "own:data"}}
train: {{steps: {_SIGUSR1_STEPS}, global_batch_size: 8, log_every: 1}}
checkpoint: {{every: 1000000}}
"""
_SIGUSR1_MODEL = """\
import time
import torch
from torch import nn

class Slow(nn.Linear):
    def forward(self, rows):
        time.sleep(0.05)
        return super().forward(rows)

def model():
    return Slow(4, 3)

def data():
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(rows, rows.argmax(1) % 3)
"""


def _sigusr1(place: Place, planted: bool) -> Facts:
    ranks, folder = _several_ranks(place), place.scratch()
    (folder / "config.yaml").write_text(_SIGUSR1_CONFIG, encoding="utf-8")
    (folder / "own.py").write_text(_SIGUSR1_MODEL, encoding="utf-8")
    flags = ranks_flags(place, ranks)
    with _started_muster(folder, "train", "--config", "config.yaml", *flags) as process:
        replaced = _wait_for_steps(process, folder, ranks)
        if not planted and process.poll() is None:
            process.send_signal(signal.SIGUSR1)
        process.wait()
    if process.returncode not in (ExitCode.GOOD, ExitCode.SAVED):
        raise MusterError(
            f"the training of this check ended with exit code {process.returncode}",
            why=(folder / "output").read_text(encoding="utf-8", errors="replace")[-2000:],
        )
    saved = committed_manifests(FolderStore(_only_run(folder).checkpoints))
    return {
        "exit_code": process.returncode,
        "checkpoints": [one.step for one in saved],
        "steps": _SIGUSR1_STEPS,
        "replaced": replaced,
    }


@contextmanager
def _started_muster(folder: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a command of muster; it does not outlive the ``with``. Its output is in the file ``output``."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            muster_command(*words),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=_STOPPED_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_STOPPED_WITHIN_S = 40.0  # the ranks have 30 s to save
_LOOK_EVERY_S = 0.2


def _wait_for_steps(process: "subprocess.Popen[bytes]", folder: Path, ranks: int) -> list[str]:
    """Wait until all ranks train and handle signals, or the command exits.

    Return the signals whose handler native code, such as NCCL, has replaced on any rank.
    """
    while process.poll() is None:
        runs = list_runs(folder / "runs")
        nodes = node_records.read_node_ranks(runs[0], time.time()) if runs else []
        known = [one for node in nodes for one in node.ranks]
        if len(known) == ranks and all((one.step or 0) >= 2 and one.handles for one in known):
            return sorted({name for one in known for name in one.replaced})
        time.sleep(_LOOK_EVERY_S)
    return []


def judge_sigusr1(facts: Facts) -> Outcome:
    """The training stops before its last step, with a checkpoint."""
    early = [step for step in facts["checkpoints"] if step < facts["steps"]]
    code = facts["exit_code"]
    saved = ", ".join(f"step {step}" for step in facts["checkpoints"]) or "nothing"
    native = ", ".join(facts["replaced"]) or "none"
    return Outcome(
        confirmed=code == ExitCode.SAVED and len(early) == 1,
        says=f"saved {saved} of {facts['steps']}, exit code {code}; signal handlers that native code replaced: {native}",
        figures={"exit_code": code, "saved_step": max(facts["checkpoints"], default=0)},
    )


_NO_SUCH_HOST = "muster-selftest-no-such-host.invalid"


def _hosts(place: Place, planted: bool) -> Facts:
    hosts = ",".join([*place.hosts, *([_NO_SUCH_HOST] if planted else [])])
    where = ("--hosts", hosts, *(("--device", "cpu") if place.device == "cpu" else ()))
    begun = time.monotonic()
    either = (ExitCode.GOOD, ExitCode.FAILED, ExitCode.IMPOSSIBLE)
    checked = json.loads(place.muster("check", *where, "--json", accepted=either))
    seconds = time.monotonic() - begun
    smoke = None
    if checked["passed"]:
        smoke = place.muster("smoke", *where)
    ranks = checked["ranks"]
    return {
        "hosts": len(place.hosts) + planted,
        "missing": sum(bool(one["missing"]) for one in checked["machines"]),
        "failures": sorted(
            {one["name"] for one in checked["findings"] if one["status"] == "failure"}
        ),
        "ranks_on": len({one["node"] for one in ranks}),
        "ranks": len(ranks),
        "compared": sum(_compared(one, "compared") for one in ranks),
        "wrong": sum(_compared(one, "wrong") for one in ranks),
        "smoke_ranks": 0 if smoke is None else count_smoke_ranks(smoke),
        "check_s": seconds,
    }


def _compared(rank: Mapping[str, Any], what: str) -> int:
    return sum(int(one["values"][what]) for one in (*rank["operations"], *rank["pairs"]))


def count_smoke_ranks(output: str) -> int:
    """Return how many ranks ``muster smoke`` reports as connected."""
    return len(set(re.findall(r"\[rank (\d+)\] barrier OK", output)))


def judge_hosts(facts: Facts) -> Outcome:
    """All hosts take part, all values are exact, and the smoke test reaches all ranks."""
    failures = ", ".join(facts["failures"])
    good = not failures and not facts["missing"] and not facts["wrong"] and facts["compared"] > 0
    good = good and facts["ranks_on"] == facts["hosts"] > 1
    return Outcome(
        confirmed=good and facts["smoke_ranks"] == facts["ranks"],
        says=f"{facts['ranks']} ranks on {facts['ranks_on']} of {facts['hosts']} hosts: {facts['wrong']} of "
        f"{facts['compared']} values are wrong, {facts['missing']} hosts are missing; failures: {failures or 'none'}; "
        f"muster smoke: {facts['smoke_ranks']} ranks",
        figures={name: facts[name] for name in ("hosts", "ranks", "compared", "wrong", "check_s")},
    )


CHECKS = (
    Check(
        id="collectives",
        question="do all collectives give exact values on all ranks?",
        fault="rank 1 adds 1 to one element of its part of each all-reduce",
        needs=(),
        seconds=20,
        measure=_collectives,
        judge=judge_collectives,
    ),
    Check(
        id="p2p-off",
        question="do collectives give exact values with NCCL_P2P_DISABLE=1, and does NCCL then use no P2P?",
        fault="the variable is not set",
        needs=("2 gpus",),
        seconds=30,
        measure=_p2p_off,
        judge=judge_p2p_off,
    ),
    Check(
        id="hang",
        question="does the launcher name the rank that hangs, and the collective in which the others wait?",
        fault="rank 0 sleeps, while the last rank is expected to",
        needs=(),
        seconds=45,
        measure=_hang,
        judge=judge_hang,
    ),
    Check(
        id="flight-recorder",
        question="does the flight recorder have the fields that Muster reads, and does NCCL's RAS count all ranks?",
        fault="a field of the dump is renamed before it is parsed",
        needs=(),
        seconds=20,
        measure=_flight_recorder,
        judge=judge_flight_recorder,
    ),
    Check(
        id="sigusr1",
        question="does SIGUSR1 make a training save a checkpoint and stop?",
        fault="no signal is sent",
        needs=(),
        seconds=40,
        measure=_sigusr1,
        judge=judge_sigusr1,
    ),
    Check(
        id="hosts",
        question="can these hosts train together, and are the values of their collectives exact?",
        fault="one more host, which does not exist",
        needs=("2 hosts",),
        seconds=90,
        measure=_hosts,
        judge=judge_hosts,
    ),
)
