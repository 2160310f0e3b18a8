"""What a machine gives to a run: GPUs that nobody else gets meanwhile, or its processor."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from muster_command import Muster
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.errors import Impossible, MusterError, NotNow, TooFewDevices
from torchmuster.launch import protocol
from torchmuster.launch.node import device_lease

Machine = Callable[[Scenario], Path]


def prepare(
    *,
    device: str = "auto",
    ranks: int | None = None,
    gpu_ids: tuple[str, ...] | None = None,
    wait_s: float = 0.0,
    environment: dict[str, str] | None = None,
    command: tuple[str, ...] = ("train.py",),
    typed: tuple[str, ...] = ("run",),
) -> protocol.Prepare:
    return protocol.Prepare(
        run_id="r",
        token="t",
        command=command,
        typed=typed,
        module=False,
        folder="/",
        device=device,
        ranks=ranks,
        gpu_ids=gpu_ids,
        wait_s=wait_s,
        environment=environment or {},
    )


def take(one: protocol.Prepare) -> device_lease.DeviceLease:
    return device_lease.lease_devices(one, lambda _: None)


def test_gpus_are_claimed_told_by_uuid_and_given_back(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    held = take(prepare(ranks=6))
    visible = held.variables["CUDA_VISIBLE_DEVICES"]
    assert visible is not None
    uuids = visible.split(",")
    assert (held.ranks, len(set(uuids))) == (6, 6)
    assert all(uuid.startswith("GPU-") for uuid in uuids)
    assert held.devices[0].endswith("NVIDIA A100-SXM4-80GB")
    others = muster("gpus", "pick", "--num-gpus", "2")
    assert others.code == 0
    assert not set(others.out.strip().split(",")) & set(uuids)
    refused = muster("gpus", "pick", "--num-gpus", "3")
    assert refused.code == 3
    assert "GPUs 0-5: claimed by" in refused.err
    held.release()
    assert muster("gpus", "pick", "--num-gpus", "8").code == 0
    held.release()  # once more does no harm


def test_without_a_number_every_free_gpu_is_taken(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    held = take(prepare())
    assert held.ranks == 8
    held.release()


def test_the_named_gpus_are_taken_in_the_order_they_were_named(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    held = take(prepare(gpu_ids=("5", "2")))
    every = take(prepare(gpu_ids=("0", "1", "3", "4", "6", "7")))
    assert [name.partition(" NVIDIA")[0] for name in held.devices] == ["GPU 5", "GPU 2"]
    assert every.ranks == 6
    held.release()
    every.release()


def test_more_ranks_than_gpus_is_refused_before_anything_is_claimed(
    machine: Machine, muster: Muster
) -> None:
    machine(scenarios.eight_a100_idle())
    with pytest.raises(Impossible) as caught:
        take(prepare(ranks=9))
    assert isinstance(caught.value, TooFewDevices)
    assert muster("gpus", "pick", "--num-gpus", "8").code == 0


def test_gpus_in_use_are_not_now_and_the_reason_is_told_while_waiting(machine: Machine) -> None:
    machine(scenarios.eight_a100_idle())
    first = take(prepare())
    with pytest.raises(NotNow):
        take(prepare(ranks=1))
    told: list[MusterError] = []

    def on_wait(error: MusterError) -> None:
        told.append(error)
        first.release()

    second = device_lease.lease_devices(prepare(ranks=8, wait_s=GIVE_UP_S), on_wait)
    assert second.ranks == 8
    assert told
    assert told[0].why
    second.release()


def test_the_claim_is_in_the_words_that_were_typed(machine: Machine, muster: Muster) -> None:
    machine(scenarios.eight_a100_idle())
    worker = ("torchmuster.worker", "--set", "train.steps=3")
    first = take(prepare(ranks=6, command=worker, typed=("train", "--config", "my q.yaml")))
    with pytest.raises(NotNow) as caught:
        take(prepare(ranks=3))
    assert "--wait" in caught.value.fix
    claims = muster("gpus", "--json").out
    assert "my q.yaml" in claims
    assert "torchmuster.worker" not in claims
    first.release()


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_processor_where_there_is_no_gpu(own_machine: Path, ranks: int | None) -> None:
    held = take(prepare(ranks=ranks))
    assert held.ranks == (ranks or 1)
    assert held.devices == ("CPU",)
    assert held.variables == {}
    held.release()


def test_the_processor_as_asked_hides_the_gpus_and_claims_none(
    machine: Machine, muster: Muster
) -> None:
    machine(scenarios.eight_a100_idle())
    held = take(prepare(device="cpu", ranks=2))
    assert held.variables["CUDA_VISIBLE_DEVICES"] == ""
    assert muster("gpus", "pick", "--num-gpus", "8").code == 0


def test_gpus_that_are_hidden_here_are_not_taken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(scenarios.eight_a100_idle())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    held = take(prepare(ranks=2))
    assert held.devices == ("CPU",)
    with pytest.raises(Impossible):
        take(prepare(device="gpu"))


def test_a_gpu_by_name_is_never_replaced_by_the_processor(own_machine: Path) -> None:
    with pytest.raises(Impossible) as caught:
        take(prepare(gpu_ids=("0",)))
    assert "no GPU" in str(caught.value)


def test_cores_are_shared_among_the_ranks(
    own_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = usable_cores().value
    one = take(prepare(device="cpu", ranks=1))
    assert one.threads == cores
    assert one.reasons[1].startswith(f"{cores} thread")
    assert take(prepare(device="cpu", ranks=cores * 4)).threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert take(prepare(device="cpu")).reasons[1].startswith("OMP_NUM_THREADS=3, ")
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_threads_that_were_asked_for_are_said(
    own_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    asked = prepare(device="cpu", environment={"OMP_NUM_THREADS": "3"})
    assert take(asked).reasons[1].startswith("OMP_NUM_THREADS=3, ")
