"""Claims: one owner per GPU, freed by the kernel, in order of arrival, between users."""

import contextlib
import errno
import fcntl
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
from torchmuster.devices import snapshot, tickets
from torchmuster.devices.acquire import HeldDevices
from torchmuster.devices.claims import Claims
from torchmuster.devices.request import DeviceRequest
from torchmuster.errors import DevicesBusy, Impossible, TooFewDevices

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
    assert "--wait" in caught.value.fix


def test_kill_9_frees_the_claim(place: Path) -> None:
    with holder(place, 8) as other:
        read_line(other)
        other.send_signal(signal.SIGKILL)
        other.wait()
        with acquire(place, DeviceRequest(count=8)) as held:
            assert len(indices(held)) == 8


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
        assert claims.read(uuids).blocking == {}
        assert set(claims.read(uuids).claimed) == set(uuids)
        with within(claims, DeviceRequest(ids=(3,))) as inner:
            assert indices(inner) == [3]
    with pytest.raises(DevicesBusy), acquire(place, DeviceRequest(ids=(2, 3))):
        acquire(
            place, DeviceRequest(ids=(3,))
        )  # without the id of its claim the same process is a stranger


def test_picks_within_one_claim_do_not_collide(place: Path) -> None:
    with acquire(place, DeviceRequest(ids=(0, 1))) as outer:
        claims = inside(place, outer)
        with within(claims, DeviceRequest(ids=(0,))) as first:
            with pytest.raises(DevicesBusy):
                within(claims, DeviceRequest(ids=(0,)))
            with within(Claims(place, first.claim_ids), DeviceRequest(ids=(0,))) as deeper:
                assert indices(deeper) == [0]
        with within(claims, DeviceRequest(ids=(0,))) as again:
            assert indices(again) == [0]


def claim_files(place: Path) -> list[Path]:
    return sorted((place / "claims").iterdir())


def test_a_release_leaves_no_file(place: Path) -> None:
    with (
        acquire(place, DeviceRequest(ids=(0,))) as outer,
        within(inside(place, outer), DeviceRequest(ids=(0,))),
    ):
        assert len(claim_files(place)) == 2
    assert claim_files(place) == []


def test_a_child_forked_during_a_claim_keeps_no_gate(place: Path) -> None:
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
        with claims.gate():
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


def test_what_can_never_be_had_is_refused_at_once_even_when_waiting(place: Path) -> None:
    with pytest.raises(TooFewDevices):
        acquire(place, DeviceRequest(count=9), wait_s=600)


@pytest.fixture
def waiter(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tickets.Ticket]:
    """Somebody who came before us and waits for six GPUs, awake however long the test takes."""
    monkeypatch.setattr(tickets, "STALE_WAITER_S", GIVE_UP_S)
    (place / "queue").mkdir(parents=True, exist_ok=True)
    uuids = [device.uuid for device in snapshot.take_snapshot().accelerators]
    ticket = tickets.Ticket(place / "queue", 6, uuids)
    yield ticket
    ticket.release()


def test_a_newcomer_does_not_take_what_an_earlier_waiter_could_have_now(
    place: Path, waiter: tickets.Ticket
) -> None:
    with acquire(place, DeviceRequest(count=2)) as held:
        assert indices(held) == [6, 7]
    with pytest.raises(DevicesBusy) as caught:
        acquire(place, DeviceRequest(count=3))
    assert "GPUs 0-5: " in caught.value.why


def test_a_waiter_who_wants_more_than_is_free_leaves_the_rest_to_others(place: Path) -> None:
    with holder(place, 3) as other:
        assert read_line(other) == "got 0 1 2"
        uuids = [device.uuid for device in snapshot.take_snapshot().accelerators]
        ticket = tickets.Ticket(place / "queue", 6, uuids)
        try:
            with acquire(place, DeviceRequest(count=5)) as held:
                assert indices(held) == [3, 4, 5, 6, 7]
        finally:
            ticket.release()


def test_a_sleeping_waiter_holds_nobody_up(
    place: Path, waiter: tickets.Ticket, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = time.time() - tickets.STALE_WAITER_S - 1
    os.utime(place / "queue" / f"{waiter.number:08d}", (long_ago, long_ago))
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
    ],
)
def test_a_scribbled_lock_file_harms_nobody(place: Path, content: bytes) -> None:
    with acquire(place, DeviceRequest(count=8)):
        for file in claim_files(place):
            file.write_bytes(content)
        uuids = [device.uuid for device in snapshot.take_snapshot().accelerators]
        assert len(Claims(place).read(uuids).claimed) == 8


def test_a_holder_cannot_steer_the_terminal_of_others(place: Path) -> None:
    with acquire(place, DeviceRequest(ids=(0,))) as held:
        (file,) = claim_files(place)
        file.write_text(json.dumps({"pid": 1, "user": "mallory", "command": "a\nb \x1b[2J"}))
        (claim,) = Claims(place).read([held.decision.value[0].uuid]).claimed.values()
    assert claim.user != "mallory"  # the owner of the file counts
    assert "\n" not in claim.command
    assert "\x1b" not in claim.command


@pytest.mark.parametrize("wish", ["", "[]", '{"request": {"count": "x"}}', '{"request": 1}'])
def test_a_scribbled_ticket_harms_nobody(place: Path, waiter: tickets.Ticket, wish: str) -> None:
    (place / "queue" / f"{waiter.number:08d}").write_text(wish)
    with acquire(place, DeviceRequest(count=8)):
        pass


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
NOBODY = 65534


@pytest.fixture
def open_place(place: Path) -> Path:
    """The folder of the claims, which all users can reach; pytest's folders are root's alone."""
    for parent in itertools.takewhile(
        lambda folder: folder.name.startswith(("pytest-", "popen-", "test_")), place.parents
    ):
        parent.chmod(parent.stat().st_mode | 0o011)
    acquire(place, DeviceRequest(count=8)).release()  # root makes the folders
    return place


@needs_root
def test_users_share_claims(open_place: Path) -> None:
    with holder(open_place, 6) as other:
        read_line(other)
        assert claim_as(NOBODY, open_place, 2) == "got 6 7"
        assert claim_as(NOBODY, open_place, 3) == "DevicesBusy"


def as_user(uid: int, work: Callable[[], str]) -> str:
    """Work as another user, in a fork: the interpreter itself may be out of that user's reach."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            answer = work()
        except BaseException as error:
            answer = type(error).__name__
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


def claim_as(uid: int, place: Path, count: int) -> str:
    def work() -> str:
        held = acquire(place, DeviceRequest(count=count), command=["sh"])
        return "got " + " ".join(map(str, indices(held)))

    return as_user(uid, work)


@needs_root
def test_the_id_of_a_claim_gives_other_users_nothing(open_place: Path) -> None:
    with acquire(open_place, DeviceRequest(ids=(0,))) as held:

        def pick_inside() -> str:
            claims = Claims(open_place, held.claim_ids)
            return str(indices(within(claims, DeviceRequest(ids=(0,)))))

        assert as_user(os.getuid(), pick_inside) == "[0]"
        assert as_user(NOBODY, pick_inside) == "DevicesBusy"


@needs_root
def test_no_user_can_rewrite_or_remove_the_files_of_another(open_place: Path) -> None:
    with acquire(open_place, DeviceRequest(ids=(0,))):
        ticket = tickets.Ticket(open_place / "queue", 8, ["GPU-1"])
        for path in (*claim_files(open_place), *(open_place / "queue").iterdir()):
            assert (
                as_user(NOBODY, lambda path=path: str(path.write_text("{}"))) == "PermissionError"
            )
            assert as_user(NOBODY, lambda path=path: str(path.unlink())) == "PermissionError"
            other = path.with_name("other")
            rename = lambda path=path, other=other: str(path.rename(other))  # noqa: E731
            assert as_user(NOBODY, rename) == "PermissionError"
        ticket.release()


@needs_root
def test_what_a_killed_user_left_keeps_nobody_from_a_claim(open_place: Path) -> None:
    assert claim_as(NOBODY, open_place, 8).startswith("got 0 1")  # the process has exited
    assert len(claim_files(open_place)) == 8
    assert claim_as(NOBODY - 1, open_place, 8).startswith("got 0 1")
    assert len(claim_files(open_place)) == 16  # only their owners and root can delete them
    with acquire(open_place, DeviceRequest(count=8)):
        assert len(claim_files(open_place)) == 8


def test_a_folder_that_cannot_be_made_is_refused_with_the_way_out(
    machine: Callable[[Scenario], Path], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    machine(scenarios.eight_a100_idle())
    (tmp_path / "file").write_text("")
    with pytest.raises(Impossible) as caught:
        acquire(tmp_path / "file" / "claims", DeviceRequest(count=1))
    assert "TORCHMUSTER_CLAIMS_DIR" in caught.value.fix
    assert caught.value == snapshot


def test_a_link_or_a_pipe_among_the_claims_is_not_a_claim(place: Path, tmp_path: Path) -> None:
    acquire(place, DeviceRequest(count=8)).release()
    first, second, *_ = snapshot.take_snapshot().accelerators
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (place / "claims" / f"{first.uuid}.1").symlink_to(victim)
    os.mkfifo(place / "claims" / f"{second.uuid}.1")
    os.mkfifo(place / "queue" / "00000001")
    with acquire(place, DeviceRequest(count=8)) as held:
        assert len(indices(held)) == 8
    assert victim.read_text() == "precious"


def test_who_waits_for_devices_waits_as_long_for_the_gate(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_GATE_WITHIN_S", 0.05)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as busy:
        busy.enter_context(Claims(place).gate())
        waiting = pool.submit(acquire, place, DeviceRequest(count=1), wait_s=GIVE_UP_S)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        busy.close()
        with waiting.result(timeout=GIVE_UP_S) as held:
            assert len(held.decision.value) == 1


def test_a_reader_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    left_over = tmp_path / "GPU-1.left-over"
    left_over.touch()
    with left_over.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert claims_module.living_files(tmp_path) == []


def test_a_claim_that_cannot_be_opened_counts_as_held(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquire(place, DeviceRequest(count=1)):
        (file,) = claim_files(place)

        def too_many_files(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", too_many_files)
            (living,) = claims_module.living_files(place / "claims")
            Claims(place).remove_left_over()
        assert living.name == file.name
        assert claim_files(place) == [file]


def test_a_file_is_locked_before_it_has_its_name_and_refused_without_locks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(place, DeviceRequest(count=8)).release()
    seen: list[str] = []

    def refuse(file: int, how: int) -> None:
        seen.extend(path.name for path in (place / "queue").iterdir())
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(Impossible, match="cannot be claimed"):
            tickets.Ticket(place / "queue", 1, [])
    assert [name[0] for name in seen] == ["."]
    assert list((place / "queue").iterdir()) == []


def test_files_are_for_their_owner_to_write_and_for_all_to_read(place: Path) -> None:
    before = os.umask(0o077)
    try:
        with acquire(place, DeviceRequest(count=1)):
            ticket = tickets.Ticket(place / "queue", 1, ["GPU-1"])
            files = [*claim_files(place), *(place / "queue").iterdir()]
            assert [path.stat().st_mode & 0o777 for path in files] == [0o644] * 2
            ticket.release()
    finally:
        os.umask(before)
    for folder in (place, place / "claims", place / "queue"):
        assert folder.stat().st_mode & 0o7777 == 0o1777
