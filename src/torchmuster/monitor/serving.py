"""The HTTP server of metrics and pages, with access control.

On loopback, every local user has access. On other addresses a token and TLS are required.
Cross-site browser requests are always refused, based on the Host header and the request's origin.
"""

import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from torchmuster.errors import Impossible

Answer = Callable[[str], tuple[bytes, str]]
_AT_ONCE = 64  # a further connection takes the place of the oldest one without a whole request
_PATIENCE_S = 10.0  # for a client that neither sends nor receives
_AT_MOST_S = 30.0  # in total, for a client that sends slowly
_SAME_SITE = ("", "none", "same-origin")  # "": not a browser


@dataclass(frozen=True, kw_only=True)
class Served:
    """The response at one path; ``answer`` gets the client's Accept header."""

    answer: Answer
    needs_token: bool = True  # False if it contains no run data
    policy: str = "default-src 'none'"  # Content-Security-Policy


@dataclass(frozen=True, kw_only=True)
class Access:
    """The server's address, and what it requires from clients."""

    what: str = "metrics"  # what is served, for error texts
    address: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tls: ssl.SSLContext | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        try:
            return ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"


def check_access(access: Access) -> None:
    """Refuse to listen on addresses other than loopback without a token and TLS."""
    if access.is_loopback:
        return
    missing = [
        name
        for name, there in (("a token", access.token), ("a certificate", access.tls))
        if there is None
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise Impossible(
            f"refusing to serve {access.what} on {access.address}: {' and '.join(missing)} {verb} "
            "missing",
            why="any client that reaches this address could read them, and the traffic would be "
            "unencrypted",
            fix="pass --token-file FILE and --certificate FILE (with its key), or serve on "
            "127.0.0.1 and "
            "connect through ssh or a proxy",
        )


@contextmanager
def serving(access: Access, served: Mapping[str, Served]) -> Iterator[int]:
    """Serve these paths in background threads within this context; yield the port."""
    check_access(access)
    try:
        server = _Server((access.address, access.port), access, served)
    except OSError as error:
        raise Impossible(
            f"cannot serve {access.what} on {access.address}:{access.port}",
            why=error.strerror or str(error),
            fix="choose another port: --port 0 picks a free port and prints it",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="serving", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class _Connection:
    until_s: float
    asked: bool = False  # whether its whole request has arrived


def _cut(request: socket.socket) -> None:
    """End a connection that another thread uses: its next read or write fails."""
    with suppress(OSError):  # the raw socket: TLS may be in the middle of a record
        socket.socket.shutdown(request, socket.SHUT_RDWR)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024  # clients that connect at the same time

    def __init__(
        self, where: tuple[str, int], access: Access, served: Mapping[str, Served]
    ) -> None:
        self.access = access
        self.served = served
        self._open: dict[socket.socket, _Connection] = {}  # oldest first
        self._turn = threading.Lock()
        if ":" in where[0]:
            self.address_family = socket.AF_INET6
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        """Bind without a DNS lookup of this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread; if there are too many connections, close the one that is slowest to ask.

        A client that sends its request at once is served before any number of slow ones can take its place.
        """
        with self._turn:
            if len(self._open) >= _AT_ONCE:
                self._close_slowest()
            self._open[request] = _Connection(until_s=time.monotonic() + _AT_MOST_S)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(request)
            raise

    def _close_slowest(self) -> None:
        """Close the oldest connection without a whole request, else the oldest one; under the lock."""
        waiting = (one for one, state in self._open.items() if not state.asked)
        slowest = next(waiting, None) or next(iter(self._open))
        del self._open[slowest]
        _cut(slowest)

    def answering(self, request: socket.socket) -> None:
        """Note that a whole request has arrived on a connection."""
        with self._turn:
            if (known := self._open.get(request)) is not None:
                known.asked = True

    def _forget(self, request: socket.socket) -> None:
        with self._turn:
            self._open.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake in this thread, so that it does not block accepting others."""
        accepted = request
        try:
            request.settimeout(_PATIENCE_S)
            if (tls := self.access.tls) is not None:
                request = tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                with self._turn:  # wrapping detaches the descriptor from the accepted socket
                    if (known := self._open.pop(accepted, None)) is None:
                        raise ConnectionAbortedError
                    accepted = request
                    self._open[accepted] = known
                request.do_handshake()
            super().process_request_thread(request, client_address)
        except OSError:  # the client disconnected, or does not use TLS
            self.shutdown_request(request)
        finally:
            self._forget(accepted)

    def service_actions(self) -> None:
        """Close connections past their deadline; called about twice a second."""
        now = time.monotonic()
        with self._turn:
            for request, state in self._open.items():
                if now > state.until_s:
                    _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log clients that disconnect during a request."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    server_version = "torchmuster"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the response, or an error status."""
        self.server.answering(self.connection)
        served = self.server.served.get(self.path.partition("?")[0])
        refused = self._refused(served)
        if refused is not None or served is None:
            self._refuse(refused or HTTPStatus.NOT_FOUND)
            return
        try:
            body, content_type = served.answer(self.headers.get("Accept", ""))
        except Exception:  # must not affect the run, and must not leak details
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._send(HTTPStatus.OK, body, content_type, served.policy)

    def _refused(self, served: Served | None) -> HTTPStatus | None:
        access = self.server.access
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _is_meant(hosts[0], access):
            return HTTPStatus.MISDIRECTED_REQUEST
        if self.headers.get("Origin") or self.headers.get("Sec-Fetch-Site", "") not in _SAME_SITE:
            return HTTPStatus.FORBIDDEN  # only our own pages may read this
        if access.token is not None and (served is None or served.needs_token):
            given = self.headers.get("Authorization", "").encode("utf-8", errors="replace")
            if not hmac.compare_digest(given, f"Bearer {access.token}".encode()):
                return HTTPStatus.UNAUTHORIZED
        return None

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(
            status, status.phrase.encode(), "text/plain; charset=utf-8", "default-src 'none'"
        )

    def _send(self, status: HTTPStatus, body: bytes, content_type: str, policy: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", content_type),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Do not log requests."""


def _is_meant(host: str, access: Access) -> bool:
    """Return whether the Host header names this server (protects against DNS rebinding)."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as "[::1"
        return False
    if access.is_loopback:
        return name in ("localhost", "127.0.0.1", "::1", access.address)
    try:
        ip_address(name)
    except ValueError:  # a name: must be this host's
        own = socket.gethostname().lower()
        return name in (own, own.partition(".")[0], socket.getfqdn().lower(), access.address)
    return True
