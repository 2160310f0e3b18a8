"""The exporter's server: it answers one question, and only those who may ask.

On loopback everybody on this machine may. Elsewhere a token and TLS are demanded. A browser that another site's
page sends here is refused everywhere: by the name that it asks for, and by where it comes from.
"""

import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from torchmuster.errors import Impossible

Answer = Callable[[str], tuple[bytes, str]]
_AT_ONCE = 8  # who comes when so many are being served waits for the system's queue
_PATIENCE_S = 10.0  # with a client that sends or takes nothing
_QUESTION = "/metrics"


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the server listens, and what it demands of those who ask."""

    address: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tls: ssl.SSLContext | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine can reach it."""
        try:
            return ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"


def check(access: Access) -> None:
    """Refuse to be open to others without a token and TLS."""
    if access.is_loopback:
        return
    missing = [
        name
        for name, there in (("a token", access.token), ("a certificate", access.tls))
        if there is None
    ]
    if missing:
        raise Impossible(
            f"metrics are not served on {access.address}: {' and '.join(missing)} is missing"
            if len(missing) == 1
            else f"metrics are not served on {access.address}: {' and '.join(missing)} are missing",
            why="whoever reaches that address could read them, and others could read along",
            fix="give --token-file FILE and --certificate FILE (with its key), or serve on 127.0.0.1 and "
            "let Prometheus come by ssh or a proxy of yours",
        )


@contextmanager
def serving(access: Access, answer: Answer) -> Iterator[int]:
    """Serve in threads of its own for as long as this lasts; gives the port."""
    check(access)
    try:
        server = _Server((access.address, access.port), access, answer)
    except OSError as error:
        raise Impossible(
            f"metrics cannot be served on {access.address}:{access.port}",
            why=error.strerror or str(error),
            fix="choose another port: --port 0 takes a free one and says which",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="exporter", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, where: tuple[str, int], access: Access, answer: Answer) -> None:
        self.access = access
        self.answer = answer
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        if ":" in where[0]:
            self.address_family = socket.AF_INET6
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who this machine is."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread, if there is a place; who is one too many is sent away."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Speak TLS here, not where others are waiting to be let in."""
        try:
            request.settimeout(_PATIENCE_S)
            if self.access.tls is not None:
                request = self.access.tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:  # it went away, or does not speak TLS
            self.shutdown_request(request)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away in the middle."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    server_version = "torchmuster"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer, or say why not."""
        refused = self._refused()
        if refused is not None:
            self._send(refused, refused.phrase.encode(), "text/plain; charset=utf-8")
            return
        try:
            body, content_type = self.server.answer(self.headers.get("Accept", ""))
        except Exception:  # a run must not suffer from it, and a stranger must not read why
            error = HTTPStatus.INTERNAL_SERVER_ERROR
            self._send(error, error.phrase.encode(), "text/plain; charset=utf-8")
            return
        self._send(HTTPStatus.OK, body, content_type)

    def _refused(self) -> HTTPStatus | None:
        access = self.server.access
        if not _is_meant(self.headers.get("Host", ""), access):
            return HTTPStatus.MISDIRECTED_REQUEST
        if self.headers.get("Origin") or self.headers.get("Sec-Fetch-Site") == "cross-site":
            return HTTPStatus.FORBIDDEN  # no page reads metrics
        if access.token is not None:
            given = self.headers.get("Authorization", "").encode("utf-8", errors="replace")
            if not hmac.compare_digest(given, f"Bearer {access.token}".encode()):
                return HTTPStatus.UNAUTHORIZED
        if urlsplit(self.path).path != _QUESTION:
            return HTTPStatus.NOT_FOUND
        return None

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Keep no log of who asks."""


def _is_meant(host: str, access: Access) -> bool:
    """Say whether a request was meant for this server, not for a name that was made to lead here."""
    name = urlsplit(f"//{host}").hostname or ""
    if access.is_loopback:
        return name in ("localhost", "127.0.0.1", "::1", access.address)
    try:
        ip_address(name)
    except ValueError:  # a name: that of this machine
        own = socket.gethostname().lower()
        return name in (own, own.partition(".")[0], socket.getfqdn().lower(), access.address)
    return True
