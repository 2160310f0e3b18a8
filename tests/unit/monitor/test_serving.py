"""The exporter answers those who may ask, and nobody else; whoever misbehaves does not hold up others."""

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch.transports.join import certificate
from torchmuster.monitor import serving
from torchmuster.monitor.serving import Access, Served

TOKEN = "a-long-enough-token"


def _answer(accept: str) -> tuple[bytes, str]:
    return b"muster_run_ranks 2\n", "text/plain"


SERVED = {"/metrics": Served(answer=_answer)}


@pytest.fixture
def port() -> Iterator[int]:
    with serving.serving(Access(), SERVED) as port:
        yield port


def _ask(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_this_machine_may_ask(port: int) -> None:
    assert _ask(port) == (200, "muster_run_ranks 2\n")
    assert _ask(port, Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/metrics", {"Host": "evil.example"}, 421),
        ("/metrics", {"Host": ""}, 421),
        ("/metrics", {"Host": "[::1"}, 421),
        ("/metrics", {"Origin": "https://evil.example"}, 403),
        ("/metrics", {"Origin": "null"}, 403),
        ("/metrics", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("/metrics", {"Sec-Fetch-Site": "same-site"}, 403),
        ("http://evil.example/metrics", {}, 421),
        ("/", {}, 404),
        ("/../../etc/passwd", {}, 404),
        ("/metrics/../../etc/passwd", {}, 404),
        ("/%2e%2e/%2e%2e/etc/passwd", {}, 404),
        ("/metrics%2f..%2f..%2fetc%2fpasswd", {}, 404),
        ("//etc/passwd", {}, 404),
    ],
)
def test_strangers_are_refused(port: int, path: str, headers: dict[str, str], status: int) -> None:
    assert _ask(port, path, **headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(port: int, method: str) -> None:
    assert _ask(port, method=method)[0] == 501


def test_without_the_token_nothing_is_said() -> None:
    with serving.serving(Access(token=TOKEN), SERVED) as port:
        assert _ask(port)[0] == 401
        assert _ask(port, Authorization="Bearer wrong")[0] == 401
        assert _ask(port, Authorization="Bearer \u00e4")[0] == 401
        assert _ask(port, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_huge_request_is_refused(port: int) -> None:
    assert _ask(port, "/" + "x" * 100_000)[0] == 414
    assert _ask(port, **{f"X-{number}": "x" for number in range(200)})[0] == 431
    assert _ask(port, **{"X-Long": "x" * 100_000})[0] == 431


def test_a_body_is_not_waited_for(port: int) -> None:
    """Who announces a terabyte is answered before the first byte of it."""
    words = b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
    assert b" 501 " in _answer_to(port, words)


@pytest.mark.parametrize(
    "words",
    [
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
    ],
    ids=["two hosts", "no host", "HTTP of old", "TLS", "zeros"],
)
def test_what_is_no_honest_question_gets_no_metrics(port: int, words: bytes) -> None:
    assert b"muster_run_ranks" not in _answer_to(port, words)
    assert _ask(port)[0] == 200


def _answer_to(port: int, words: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as client:
        client.sendall(words)
        heard = b""
        with contextlib.suppress(ConnectionResetError):  # it was sent more than it wanted to hear
            while piece := client.recv(65536):
                heard += piece
        return heard


def test_slow_clients_take_all_places_but_not_for_ever(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(serving, "_PATIENCE_S", 0.2)
        patch.setattr(serving._Handler, "timeout", 0.2)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        try:
            for one in silent:
                one.settimeout(GIVE_UP_S)
                assert one.recv(1) == b"", "each of them is sent away"
        finally:
            for one in silent:
                one.close()
    assert _ask(port)[0] == 200


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("words", [b"", b"GET /metrics HTTP/1.1\r\nX: "], ids=["silent", "half"])
def test_an_honest_client_is_answered_among_500_slow_ones(with_tls: bool, words: bytes) -> None:
    made = certificate.make_certificate() if with_tls else None
    access = Access(tls=made.context if made else None)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving.serving(access, SERVED))
        for _ in range(500):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                slow.sendall(words)
        for _ in range(3):
            client: socket.socket = socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S)
            if with_tls:
                trusting = ssl.create_default_context()
                trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
                client = trusting.wrap_socket(client)
            with client:
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(20).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
def test_who_sends_a_byte_now_and_then_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    """Each byte comes in time; the whole question never does."""
    monkeypatch.setattr(serving, "_AT_MOST_S", 0.5)
    access = Access(tls=certificate.make_certificate().context if with_tls else None)
    with serving.serving(access, SERVED) as port:
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(serving._AT_ONCE)]
        deadline = time.monotonic() + GIVE_UP_S
        try:
            while slow:
                assert time.monotonic() < deadline, "they are served for ever"
                slow = [one for one in slow if _drips(one)]
        finally:
            for one in slow:
                one.close()


def _drips(client: socket.socket) -> bool:
    """Send a byte; say whether the other side still listens."""
    client.settimeout(0.05)
    try:
        client.sendall(b"\x16")
        if client.recv(1000) != b"":
            return True
    except TimeoutError:
        return True
    except OSError:
        pass
    client.close()
    return False


def test_who_takes_nothing_of_a_large_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_PATIENCE_S", 2.0)
    monkeypatch.setattr(serving._Handler, "timeout", 2.0)
    large = bytes(50_000_000)
    served = {"/metrics": Served(answer=lambda accept: (large, "text/plain"))}
    with serving.serving(Access(), served) as port:
        deaf = [socket.create_connection(("127.0.0.1", port)) for _ in range(serving._AT_ONCE)]
        try:
            for one in deaf:
                one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            deadline = time.monotonic() + GIVE_UP_S
            while True:
                assert time.monotonic() < deadline, "they keep their places"
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if _ask(port)[0] == 200:
                        break
        finally:
            for one in deaf:
                one.close()


def test_an_answer_that_fails_says_nothing_of_why() -> None:
    def fail(accept: str) -> tuple[bytes, str]:
        raise RuntimeError("a secret path")

    with serving.serving(Access(), {"/metrics": Served(answer=fail)}) as port:
        assert _ask(port) == (500, "Internal Server Error")


@pytest.mark.parametrize(
    ("access", "missing"),
    [
        (Access(address="0.0.0.0"), "a token and a certificate are missing"),
        (Access(address="10.0.0.1", token=TOKEN), "a certificate is missing"),
    ],
)
def test_nobody_else_is_served_without_protection(access: Access, missing: str) -> None:
    with pytest.raises(Impossible) as caught:
        serving.check_access(access)
    assert caught.value.what == f"refusing to serve metrics on {access.address}: {missing}"
    assert "--token-file" in caught.value.fix


def test_with_both_others_are_served() -> None:
    made = certificate.make_certificate()
    access = Access(address="0.0.0.0", token=TOKEN, tls=made.context)
    with serving.serving(access, SERVED) as port:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=GIVE_UP_S, context=context
        )
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            assert connection.getresponse().status == 200
        finally:
            connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            _ask(port)  # without TLS


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with (
        pytest.raises(Impossible, match=f"cannot serve metrics on 127.0.0.1:{port}"),
        serving.serving(Access(port=port), SERVED),
    ):
        pass


def test_a_token_that_others_may_read_is_none(tmp_path: Path) -> None:
    from torchmuster.cli import serving_flags

    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(Impossible) as caught:
        serving_flags.token_from(path)
    assert caught.value.fix == f"chmod 600 {path}"
    path.chmod(0o600)
    assert serving_flags.token_from(path) == TOKEN
    path.write_text("short")
    with pytest.raises(Impossible, match="too short"):
        serving_flags.token_from(path)
