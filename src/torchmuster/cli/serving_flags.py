"""The flags of commands that serve something: where, and to whom."""

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
    """Add where to listen and what to demand of those who ask."""
    parser.add_argument(
        "--address",
        "--bind",
        default=HERE_ONLY,
        help=f"where to listen ({HERE_ONLY}: this machine only)",
    )
    usual = f"{port}; 0: a free one" if port else "a free one"
    parser.add_argument("--port", type=int, default=port, help=f"which port ({usual})")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="who asks must know the word in this file, which only you may read",
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="serve by TLS: a certificate and its key (PEM, in one file)",
    )


def token_from(path: Path | None) -> str | None:
    """Return the word that a file holds, which must be a secret."""
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            token = stream.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Impossible(
            f"the token cannot be read from {path}",
            why=str(error),
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise Impossible(
            f"the token in {path} is no secret: others on this machine may read it",
            fix=f"chmod 600 {path}",
        )
    if len(token) < _SHORTEST_TOKEN:
        raise Impossible(
            f"the token in {path} is too short to keep anybody out",
            why=f"it has {len(token)} characters, and {_SHORTEST_TOKEN} are the least",
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        )
    return token


def tls_from(path: Path | None) -> "ssl.SSLContext | None":
    """Return how to speak TLS with this certificate."""
    if path is None:
        return None
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        raise Impossible(
            f"the certificate cannot be read from {path}",
            why=str(error),
            fix="give a PEM file that has the certificate and its private key, without a password",
        ) from error
    return context
