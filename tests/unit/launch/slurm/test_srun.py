"""What srun is told, and whom the lines on its input are for."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports.channel import Channel, Transport
from torchmuster.launch.transports.srun import SrunTransport, environment_for_srun, srun_command
from torchmuster.launch.transports.srun_step import addressed

ALLOCATION = Allocation(
    job="41",
    nodes=("n1", "n2"),
    gpus=(8, 8),
    cores=64,
    tasks_per_node=8,
    copies=1,
    restarts=0,
)


def test_one_step_over_all_nodes_with_all_their_gpus() -> None:
    words = srun_command(ALLOCATION, ["node agent"])
    assert words[:5] == ["srun", "--jobid=41", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert "--gres=gpu:8" in words
    assert "--unbuffered" not in words  # it cuts lines
    assert words[-3:] == ["node agent", "--place-from", "SLURM_PROCID"]


def test_one_node_again() -> None:
    words = srun_command(ALLOCATION, ["node agent"], place=1)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n2", "--gres=gpu:8"} <= set(words)
    assert words[-3:] == ["node agent", "--place", "1"]


def test_each_component_of_a_heterogeneous_job_has_its_own_step() -> None:
    both = replace(ALLOCATION, nodes=("n9", "n1", "n2"), gpus=(2, 4, 4), component_sizes=(1, 2))
    first = srun_command(both, ["node agent"])
    assert {"--het-group=0", "--nodes=1", "--gres=gpu:2"} <= set(first)
    assert first[-3:] == ["node agent", "--place-from", "SLURM_PROCID"]
    second = srun_command(both, ["node agent"], component=1)
    assert {"--jobid=41", "--het-group=1", "--nodes=2", "--gres=gpu:4"} <= set(second)
    assert second[-5:] == ["node agent", "--place-from", "SLURM_PROCID", "--first-place", "1"]
    again = srun_command(both, ["node agent"], place=2)
    assert {"--het-group=1", "--nodes=1", "--nodelist=n2", "--gres=gpu:4"} <= set(again)
    assert again[-3:] == ["node agent", "--place", "2"]


def test_only_the_jobs_own_variables_reach_srun() -> None:
    kept = {"HOME": "/", "SLURM_CONF": "c", "SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"}
    options = dict.fromkeys(
        ["SLURM_GPUS_PER_TASK", "SLURM_UNBUFFEREDIO", "SLURM_NTASKS", "SLURM_EXPORT_ENV"], "1"
    )
    assert environment_for_srun({**kept, **options, "SRUN_CPUS_PER_TASK": "2"}) == kept


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([b"=a\n", b"+b\n=c\n", b"=d\n"]))))
def test_everyone_gets_his_own_messages_in_order(messages: list[tuple[int, bytes]]) -> None:
    written = b"".join(addressed(messages, [0, 1, 2])).splitlines(keepends=True)
    for place in range(3):
        mine = (b"%d " % place, b"* ")
        got = b"".join(line[2:] for line in written if line.startswith(mine))
        assert got == b"".join(lines for to, lines in messages if to == place)


def test_what_all_get_is_written_once() -> None:
    to_all = [(place, b"+x\n=y\n") for place in range(3)]
    assert addressed(to_all, [0, 1, 2]) == [b"* +x\n* =y\n"]
    assert addressed(to_all[:2], [0, 1]) == [b"* +x\n* =y\n"]  # the third has ended


def test_what_some_get_does_not_reach_the_others() -> None:
    assert addressed([(0, b"=x\n"), (2, b"=x\n")], [0, 1, 2]) == [b"0 =x\n", b"2 =x\n"]


def test_what_a_task_prolog_prints_is_not_taken_for_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [
        "0: ==== Welcome ====",
        "0: +-----+",
        f"0: {protocol.to_lines(protocol.Alive()).decode()}",
    ]
    (tmp_path / "words").write_text("\n".join(says))
    (tmp_path / "srun").write_text(f"#!/bin/sh\ncat {tmp_path / 'words'}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def scene() -> protocol.FromAgent | None:
        arrivals: asyncio.Queue[Channel] = asyncio.Queue()
        transport = SrunTransport(ALLOCATION)
        await transport.open(lambda place, channel: arrivals.put_nowait(channel))
        first = await (await asyncio.wait_for(arrivals.get(), GIVE_UP_S)).receive()
        await transport.close()
        return first

    assert asyncio.run(scene()) == protocol.Alive()


def test_the_agents_are_started_with_this_python() -> None:
    words = [sys.executable, "-m", "torchmuster.launch.node", "--place", "0"]
    assert srun_command(ALLOCATION, place=0)[-5:] == words


def test_without_srun_every_place_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def scene() -> protocol.Trouble | None:
        transport: Transport = SrunTransport(ALLOCATION)
        assert transport.gave_up(1) is None
        await transport.open(lambda place, channel: None)
        trouble = transport.gave_up(1)
        await transport.close()
        return trouble

    trouble = asyncio.run(scene())
    assert trouble is not None
    assert trouble.name == "srun-failed"
    assert (trouble.what, trouble.why) == snapshot
