"""Claims: one owner per GPU, freed by the kernel, in order of arrival, between users."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from patience import GIVE_UP_S
from torchmuster.devices import acquire as acquire_module
from torchmuster.devices import claims as claims_module
from torchmuster.devices import snapshot
from torchmuster.devices import tickets as waiting
from torchmuster.devices.acquire import HeldDevices
from torchmuster.devices.claims import Claims, claims_folder
from torchmuster.devices.request import DeviceRequest
from torchmuster.errors import DevicesBusy, Impossible, MusterError, NotNow, TooFewDevices

# A separate process that claims, says which GPUs it got, and holds them until its stdin closes.
HOLDER = """
import os, sys
from pathlib import Path
from torchmuster.devices import snapshot
from torchmuster.devices.acquire import acquire_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.request import DeviceRequest
held = acquire_devices(
    Claims(Path(sys.argv[1])), snapshot.take_snapshot, DeviceRequest(count=int(sys.argv[2])), environment={}, wait_s=float(sys.argv[3]),
    on_wait=lambda _: print("waiting", flush=True), command=["python", "train.py"])
print("got", *(device.index for device in held.decision.value), flush=True)
if len(sys.argv) > 4:  # become a program that keeps the claim
    held.hand_over(os.environ)
    os.execvp(sys.argv[4], sys.argv[4:])
sys.stdin.read()
"""


@pytest.fixture
def place(machine: Callable[[Scenario], Path], own_machine: Path) -> Path:
    machine(scenarios.eight_a100_idle())
    return own_machine / "claims"


@contextmanager
def holder(
    place: Path, count: int, *, wait_s: float = 0, become: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place), str(count), str(wait_s), *become],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def acquire(place: Path, request: DeviceRequest, **options: Any) -> HeldDevices:
    return acquire_module.acquire_devices(
        Claims(place), snapshot.take_snapshot, request, environment={}, **options
    )


def indices(held: HeldDevices) -> list[int]:
    return [device.index for device in held.decision.value]


def test_two_claims_never_share_a_gpu(place: Path) -> None:
    with holder(place, 5) as other:
        assert read_line(other) == "got 0 1 2 3 4"
        with acquire(place, DeviceRequest(count=3)) as held:
            assert indices(held) == [5, 6, 7]


def test_a_claimed_gpu_is_refused_with_its_holder_named(place: Path) -> None:
    with holder(place, 8) as other:
        read_line(other)
        with pytest.raises(DevicesBusy) as caught:
            acquire(place, DeviceRequest(ids=(3,)))
    user = f"root (pid {other.pid}, python train.py)" if os.getuid() == 0 else str(other.pid)
    assert "GPU 3" in caught.value.what
    assert user in caught.value.why
    assert "muster gpus pick --gpu-ids 3 --wait" in caught.value.fix


def test_kill_9_frees_the_claim(place: Path) -> None:
    with holder(place, 8) as other:
        read_line(other)
        other.send_signal(signal.SIGKILL)
        other.wait()
        with acquire(place, DeviceRequest(count=8)) as held:
            assert len(indices(held)) == 8


def test_release_frees_the_claim_and_may_be_called_twice(place: Path) -> None:
    first = acquire(place, DeviceRequest(count=8))
    first.release()
    first.release()
    with holder(place, 8) as other:
        assert read_line(other).startswith("got")


def test_the_claim_lives_as_long_as_the_program_it_was_handed_to(place: Path) -> None:
    # The shell ends at once, its child lives on with the claim: the GPU is still in somebody's hands.
    script = "sleep 600 & echo $!"
    with holder(place, 8, become=("sh", "-c", script)) as other:
        read_line(other)
        survivor = int(read_line(other))
        other.wait()
        try:
            with pytest.raises(DevicesBusy):
                acquire(place, DeviceRequest(count=1))
        finally:
            os.kill(survivor, signal.SIGKILL)
        with acquire(place, DeviceRequest(count=8), wait_s=GIVE_UP_S):  # until it has gone
            pass


def inside(place: Path, held: HeldDevices) -> Claims:
    """The claims as a program sees them that runs under a claim."""
    environment = {"TORCHMUSTER_CLAIMS_DIR": str(place)}
    held.hand_over(environment)
    return Claims.here(environment)


def within(claims: Claims, request: DeviceRequest) -> HeldDevices:
    return acquire_module.acquire_devices(claims, snapshot.take_snapshot, request, environment={})


def test_a_program_under_a_claim_can_pick_from_what_it_has(place: Path) -> None:
    with acquire(place, DeviceRequest(ids=(2, 3))) as outer:
        claims = inside(place, outer)
        uuids = [one.uuid for one in outer.decision.value]
        assert claims.glance(uuids).in_the_way == {}
        assert set(claims.glance(uuids).claimed) == set(uuids)
        with within(claims, DeviceRequest(ids=(3,))) as inner:
            assert indices(inner) == [3]
    with pytest.raises(DevicesBusy), acquire(place, DeviceRequest(ids=(2, 3))):
        acquire(place, DeviceRequest(ids=(3,)))  # without its token the same process is a stranger


def test_picks_within_one_claim_do_not_collide(place: Path) -> None:
    with acquire(place, DeviceRequest(ids=(0, 1))) as outer:
        claims = inside(place, outer)
        with within(claims, DeviceRequest(ids=(0,))) as first:
            with pytest.raises(DevicesBusy):
                within(claims, DeviceRequest(ids=(0,)))
            with within(Claims(place, first.tokens), DeviceRequest(ids=(0,))) as deeper:
                assert indices(deeper) == [0]
        with within(claims, DeviceRequest(ids=(0,))) as again:
            assert indices(again) == [0]


def test_files_of_inner_picks_are_cleared_away(place: Path) -> None:
    with (
        acquire(place, DeviceRequest(ids=(0,))) as outer,
        within(inside(place, outer), DeviceRequest(ids=(0,))),
    ):
        assert len(list(place.glob("GPU-*.lock"))) == 2
    with acquire(place, DeviceRequest(ids=(0,))):
        assert len(list(place.glob("GPU-*.lock"))) == 1


def test_a_waiter_outside_is_not_promised_what_a_claim_has(place: Path) -> None:
    with acquire(place, DeviceRequest(count=8)) as outer:
        ticket = waiting.Ticket(place / "queue", DeviceRequest(count=8), {})
        try:
            with within(inside(place, outer), DeviceRequest(count=1)) as inner:
                assert len(indices(inner)) == 1
        finally:
            ticket.give_back()


def test_the_same_pid_in_another_container_is_a_stranger(place: Path) -> None:
    with acquire(place, DeviceRequest(count=8)):
        for lock in place.glob("GPU-*.lock"):
            stored = json.loads(lock.read_text())
            lock.write_text(json.dumps({**stored, "pid": 1}))
        with pytest.raises(DevicesBusy):
            acquire(place, DeviceRequest(count=1))


def test_a_child_forked_during_a_look_keeps_no_lock(place: Path) -> None:
    acquire(place, DeviceRequest(count=8)).release()
    claims = Claims(place)
    reader, writer = os.pipe()
    with claims.gate():
        child = os.fork()
        if child == 0:  # holds copies of all that is open now, until the parent lets it go
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    try:
        with claims.gate(patience_s=0.0):
            pass
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)


def test_a_waiter_is_served_when_the_gpu_comes_free(place: Path) -> None:
    with holder(place, 8) as first:
        read_line(first)
        with holder(place, 2, wait_s=GIVE_UP_S) as second:
            assert read_line(second) == "waiting"
            first.kill()
            line = read_line(second)
            while line == "waiting":
                line = read_line(second)
            assert line == "got 0 1"


def test_waiting_ends_with_the_refusal_when_time_is_up(place: Path) -> None:
    with holder(place, 8) as other:
        read_line(other)
        with pytest.raises(DevicesBusy):
            acquire(place, DeviceRequest(count=1), wait_s=0.5)
    assert list((place / "queue").iterdir()) == []


def test_who_waits_is_told_what_is_in_the_way_and_may_leave_the_queue(place: Path) -> None:
    def leave(error: MusterError) -> None:
        raise KeyboardInterrupt(error.why)

    with holder(place, 8) as other:
        read_line(other)
        with pytest.raises(KeyboardInterrupt, match="claimed by"):
            acquire(place, DeviceRequest(count=1), wait_s=GIVE_UP_S, on_wait=leave)
    assert list((place / "queue").iterdir()) == []


def test_what_can_never_be_had_is_refused_at_once_even_when_waiting(place: Path) -> None:
    with pytest.raises(TooFewDevices):
        acquire(place, DeviceRequest(count=9), wait_s=600)


@pytest.fixture
def waiter(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[waiting.Ticket]:
    """Somebody who came before us and waits for six GPUs, awake however long the test takes."""
    monkeypatch.setattr(waiting, "STALE_WAITER_S", GIVE_UP_S)
    (place / "queue").mkdir(parents=True)
    ticket = waiting.Ticket(place / "queue", DeviceRequest(count=6), {})
    yield ticket
    ticket.give_back()


def test_a_newcomer_does_not_take_what_an_earlier_waiter_could_have_now(
    place: Path, waiter: waiting.Ticket
) -> None:
    with acquire(place, DeviceRequest(count=2)) as held:
        assert indices(held) == [6, 7]
    with pytest.raises(DevicesBusy) as caught:
        acquire(place, DeviceRequest(count=3))
    assert "GPUs 0-5 " in caught.value.why


def test_a_waiter_who_wants_more_than_is_free_leaves_the_rest_to_others(place: Path) -> None:
    with holder(place, 3) as other:
        assert read_line(other) == "got 0 1 2"
        ticket = waiting.Ticket(place / "queue", DeviceRequest(count=6), {})
        try:
            with acquire(place, DeviceRequest(count=5)) as held:
                assert indices(held) == [3, 4, 5, 6, 7]
        finally:
            ticket.give_back()


def test_a_sleeping_waiter_holds_nobody_up(
    place: Path, waiter: waiting.Ticket, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = time.time() - waiting.STALE_WAITER_S - 1
    os.utime(waiter.path, (long_ago, long_ago))
    with acquire(place, DeviceRequest(count=8)) as held:
        assert len(indices(held)) == 8


def test_a_dead_waiter_is_cleared_away(place: Path) -> None:
    with holder(place, 8) as first:
        read_line(first)
        with holder(place, 8, wait_s=GIVE_UP_S) as second:
            read_line(second)
            assert len(list((place / "queue").iterdir())) == 1
    with acquire(place, DeviceRequest(count=8)):
        assert list((place / "queue").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[1, 2]",
        b"\xff\xfe",
        b'{"pid": "x", "user": {}}',
        b"[" * 30000,
        b'{"since_unix_s": NaN}',
        b'{"since_unix_s": -Infinity}',
        b'{"since_unix_s": 1' + b"0" * 400 + b"}",
        b'{"token": 3}',
    ],
)
def test_a_scribbled_lock_file_harms_nobody(place: Path, content: bytes) -> None:
    with acquire(place, DeviceRequest(count=8)):
        for lock in place.glob("GPU-*.lock"):
            lock.write_bytes(content)
        claims = (
            Claims(place).glance(one.uuid for one in snapshot.take_snapshot().accelerators).claimed
        )
        assert len(claims) == 8


def test_a_holder_cannot_steer_the_terminal_of_others(place: Path) -> None:
    with acquire(place, DeviceRequest(count=8)):
        lock = next(place.glob("GPU-*.lock"))
        words = {"pid": 1, "user": "\x1b[2Jmallory", "command": "a\nb --token hunter2"}
        lock.write_text(json.dumps(words))
        (claim,) = Claims(place).glance([lock.stem]).claimed.values()
    assert claim.user == "\N{REPLACEMENT CHARACTER}[2Jmallory"
    assert "\n" not in claim.command


@pytest.mark.parametrize("wish", ["", "[]", '{"request": {"count": "x"}}', '{"request": 1}'])
def test_a_scribbled_ticket_harms_nobody(place: Path, waiter: waiting.Ticket, wish: str) -> None:
    waiter.path.write_text(wish)
    with acquire(place, DeviceRequest(count=8)):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_users_share_claims_whoever_came_first(place: Path) -> None:
    for parent in itertools.takewhile(
        lambda one: one.name.startswith(("pytest-", "popen-", "test_")), place.parents
    ):
        parent.chmod(parent.stat().st_mode | 0o011)  # pytest's folders are root's alone
    previous = os.umask(0o077)
    try:
        acquire(place, DeviceRequest(count=8)).release()  # root makes all the files
    finally:
        os.umask(previous)
    with holder(place, 6) as other:
        read_line(other)
        assert _as_nobody(place, 2) == "got 6 7"
        assert _as_nobody(place, 3) == "DevicesBusy"


def _as_nobody(place: Path, count: int) -> str:
    """Claim as another user, in a fork: the interpreter itself may be out of that user's reach."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            held = acquire(place, DeviceRequest(count=count), command=["sh"])
            answer = "got " + " ".join(map(str, indices(held)))
        except BaseException as error:
            answer = type(error).__name__
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


def test_a_folder_that_cannot_be_made_is_refused_with_the_way_out(
    machine: Callable[[Scenario], Path], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.eight_a100_idle())
    (tmp_path / "file").write_text("")
    with pytest.raises(Impossible) as caught:
        acquire(tmp_path / "file" / "claims", DeviceRequest(count=1))
    assert "TORCHMUSTER_CLAIMS_DIR" in caught.value.fix
    assert caught.value == snapshot


def test_a_lock_file_that_is_a_link_is_not_followed(place: Path, tmp_path: Path) -> None:
    acquire(place, DeviceRequest(count=8)).release()
    lock = next(place.glob("GPU-*.lock"))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(DevicesBusy) as caught:
        acquire(place, DeviceRequest(count=8))
    assert "(pid 0, " in caught.value.why  # who holds it is not known
    assert victim.read_text() == "precious"


def test_a_stuck_gate_is_told_and_not_waited_for_forever(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_GATE_PATIENCE_S", 0.2)
    stuck = Claims(place)
    with stuck.gate(), pytest.raises(NotNow) as caught:
        acquire(place, DeviceRequest(count=1))
    assert str(place) in caught.value.what


def test_who_waits_for_devices_waits_as_long_for_the_gate(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_GATE_PATIENCE_S", 0.05)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as busy:
        busy.enter_context(Claims(place).gate())
        waiting = pool.submit(acquire, place, DeviceRequest(count=1), wait_s=GIVE_UP_S)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        busy.close()
        with waiting.result(timeout=GIVE_UP_S) as held:
            assert len(held.decision.value) == 1


def test_a_waiter_in_the_queue_is_not_ended_by_a_busy_gate(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_GATE_PATIENCE_S", 0.05)
    with ThreadPoolExecutor(1) as pool, acquire(place, DeviceRequest(count=8)) as all_of_them:
        waiting = pool.submit(acquire, place, DeviceRequest(count=1), wait_s=GIVE_UP_S)
        while not list((place / "queue").iterdir()):
            time.sleep(0.01)
        with Claims(place).gate(GIVE_UP_S), pytest.raises(TimeoutError):
            waiting.result(timeout=1.5 * acquire_module.POLL_S)
        all_of_them.release()
        with waiting.result(timeout=GIVE_UP_S) as held:
            assert len(held.decision.value) == 1


def test_a_stuck_gate_or_a_pipe_hides_no_claim(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_GLANCE_PATIENCE_S", 0.1)
    uuids = [one.uuid for one in snapshot.take_snapshot().accelerators]
    with acquire(place, DeviceRequest(count=2)):
        os.mkfifo(place / "queue" / "0000")
        with Claims(place).gate():
            assert len(Claims(place).glance(uuids).claimed) == 2
        os.mkfifo(place / f"{uuids[7]}.lock")
        assert "is not a regular file" in Claims(place).glance(uuids).claimed[uuids[7]].command
    with acquire(place, DeviceRequest(count=2)):
        pass


def test_a_strict_umask_does_not_cost_the_place_in_the_queue(place: Path) -> None:
    (place / "queue").mkdir(parents=True)
    before = os.umask(0o077)
    try:
        ticket = waiting.Ticket(place / "queue", DeviceRequest(count=1), {})
    finally:
        os.umask(before)
    assert ticket.path.stat().st_mode & 0o777 == 0o644
    ticket.give_back()


def test_looking_at_claims_makes_nothing(tmp_path: Path) -> None:
    assert Claims(tmp_path / "none").glance(["GPU-1"]).claimed == {}
    assert not (tmp_path / "none").exists()


def test_the_folder_is_the_same_for_everybody_unless_it_is_given() -> None:
    assert claims_folder({"TORCHMUSTER_CLAIMS_DIR": "/elsewhere"}) == Path("/elsewhere")
    assert claims_folder({"TMPDIR": "/mine", "HOME": "/home/me"}) == claims_folder({})
    assert claims_folder({}).name == "torchmuster"
