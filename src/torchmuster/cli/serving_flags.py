"""The flags of commands that serve HTTP: address, port, token and TLS."""

import argparse
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster.errors import Impossible

if TYPE_CHECKING:
    import ssl

HERE_ONLY = "127.0.0.1"
_SHORTEST_TOKEN = 16


def add_serving_flags(parser: argparse._ActionsContainer, *, port: int) -> None:
    """Add the flags for the listen address, the port, the token and the certificate."""
    parser.add_argument(
        "--address",
        "--bind",
        default=HERE_ONLY,
        help=f"address to listen on (default: {HERE_ONLY}, this machine only)",
    )
    usual = f"{port}; 0 picks a free port" if port else "a free port"
    parser.add_argument(
        "--port", type=int, default=port, help=f"port to listen on (default: {usual})"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="require the token stored in this file, which only you may read",
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="serve over TLS: a certificate and its key (PEM, in one file)",
    )


def token_from(path: Path | None) -> str | None:
    """Return the token in a file that only its owner can read."""
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            token = stream.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Impossible(
            f"cannot read the token from {path}",
            why=str(error),
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        ) from error
    # The group of a file that another user owns is how this user reads it: a Secret that Kubernetes mounts.
    secret_from = stat.S_IROTH if status.st_uid != os.geteuid() else stat.S_IRGRP | stat.S_IROTH
    if status.st_mode & secret_from:
        raise Impossible(
            f"the token in {path} is not secret: other users of this machine can read it",
            fix=f"chmod 600 {path}",
        )
    if len(token) < _SHORTEST_TOKEN:
        raise Impossible(
            f"the token in {path} is too short",
            why=f"it has {len(token)} characters; the minimum is {_SHORTEST_TOKEN}",
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        )
    return token


def tls_from(path: Path | None) -> "ssl.SSLContext | None":
    """Return the TLS context for this certificate."""
    if path is None:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        raise Impossible(
            f"cannot read the certificate from {path}",
            why=str(error),
            fix="give a PEM file with the certificate and its private key, without a password",
        ) from error
    return context
