"""Shares: how many GPUs each user of a host may claim for as long as they want.

An administrator writes them to a file. Without the file, no claim is limited. Further GPUs can only be borrowed
(``borrow.py``).
"""

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.decision import Decision
from torchmuster.devices.claims import open_to_look
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.errors import Impossible, NotNow
from torchmuster.units import plural

_USUAL_FILE = Path("/etc/torchmuster/shares.yaml")
_MOST_BYTES = 64 * 1024
_MOST_GPUS = 4096
_EXAMPLE = "default: 2\nusers: {eva: 4, ben: 1}"


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The share of each user; ``default`` is that of users who are not listed, None for no limit."""

    users: Mapping[str, int]
    default: int | None

    def of(self, user: str) -> int | None:
        """Return a user's share; None if it is not limited."""
        return self.users.get(user, self.default)

    def weights(self, users: Iterable[str]) -> dict[str, float]:
        """Return the shares that order the queue; a user without a limit counts like one with a share of 1."""
        return {user: float(share) for user in users if (share := self.of(user)) is not None}


def shares_file(environment: Mapping[str, str]) -> Path:
    """Return where the shares of this host are; next to the claims if their folder was chosen."""
    given = environment.get("TORCHMUSTER_CLAIMS_DIR")
    return Path(given) / "shares.yaml" if given else _USUAL_FILE


def read_shares(environment: Mapping[str, str]) -> Decision[Shares | None]:
    """Return the shares of this host; None without a file, or if others than root could have written it.

    The reason says why a file is ignored. A file of root that cannot be parsed is an error.
    """
    path = shares_file(environment)
    try:
        file = open_to_look(path)
    except FileNotFoundError:
        return Decision(value=None, reason="")
    except OSError as error:
        why = error.strerror or str(error)
        return Decision(value=None, reason=f"{path} is ignored: {why}")
    try:
        status = os.fstat(file)
        if status.st_uid != 0:
            return Decision(
                value=None, reason=f"{path} is ignored: its owner is uid {status.st_uid}, not root"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Decision(
                value=None, reason=f"{path} is ignored: others than root can write to it"
            )
        text = os.pread(file, _MOST_BYTES + 1, 0)
    finally:
        os.close(file)
    return Decision(value=_parse_shares(text, path), reason=f"shares from {path}")


def _parse_shares(data: bytes, path: Path) -> Shares:
    if len(data) > _MOST_BYTES:
        raise _unusable(path, f"it is larger than {_MOST_BYTES // 1024} KiB")
    from ruamel.yaml import YAML  # on use: most hosts have no such file

    try:
        content = YAML(typ="safe", pure=True).load(data.decode("utf-8"))
    except Exception as error:  # of several classes, also RecursionError
        raise _unusable(path, str(error).strip().partition("\n")[0]) from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise _unusable(path, "it is not a mapping")
    if unknown := [str(key) for key in content if key not in ("default", "users")]:
        raise _unusable(path, f"unknown key {unknown[0]!r}; the keys are default and users")
    users = content.get("users") or {}
    if not isinstance(users, dict):
        raise _unusable(path, "users is not a mapping of user names to numbers of GPUs")
    default = content.get("default")
    return Shares(
        users={str(user): _share(f"users.{user}", value, path) for user, value in users.items()},
        default=None if default is None else _share("default", default, path),
    )


def _share(name: str, value: Any, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_GPUS:
        raise _unusable(path, f"{name} is {value!r}, which is not a number of GPUs")
    return value


def _unusable(path: Path, why: str) -> Impossible:
    return Impossible(
        f"cannot read the shares of this host in {path}",
        why=why,
        fix=f"ask an administrator to correct the file, for example:\n{_EXAMPLE}",
    )


def most_within_share(
    request: DeviceRequest, user: str, claims: Mapping[str, Claim], shares: Shares | None
) -> int | None:
    """Return how many GPUs a request may get; None if there is no limit.

    Raise if the request needs more than the user's share, or than what is left of it now.
    """
    left = share_left(user, claims, shares)
    if left is None or shares is None or request.wanted <= left:
        return left
    share = plural(shares.of(user) or 0, "GPU")
    what = f"{request} requested, but the share of {user} is {share}"
    borrow = "muster train --num-gpus MIN:MAX --borrow uses idle GPUs beyond a share"
    if request.wanted > (shares.of(user) or 0):
        raise Impossible(what, why="an administrator set the shares of this host", fix=borrow)
    raise NotNow(
        f"{what}, and {left} of them are left" if left else f"{what}, which is used up",
        why=f"{user} has claimed {(shares.of(user) or 0) - left} of them: muster gpus",
        fix=f"wait for your own jobs: add --wait\n{borrow}",
    )


def describe_shares(shares: Shares, claims: Mapping[str, Claim]) -> str:
    """Return ``shares: eva 4 (2 claimed, 3 borrowed), ben 1, others 2``."""
    users = dict.fromkeys([*shares.users, *(claim.user for claim in claims.values())])
    parts = []
    for user in users:
        held = [claim.borrowed for claim in claims.values() if claim.user == user]
        counts = [(held.count(False), "claimed"), (held.count(True), "borrowed")]
        uses = ", ".join(f"{count} {word}" for count, word in counts if count)
        share = shares.of(user)
        if user in shares.users or uses:
            parts.append(
                f"{user} {'-' if share is None else share}" + (f" ({uses})" if uses else "")
            )
    others = "no limit" if shares.default is None else str(shares.default)
    return "shares: " + ", ".join([*parts, f"others {others}"])


def share_left(user: str, claims: Mapping[str, Claim], shares: Shares | None) -> int | None:
    """Return how many more GPUs a user may claim without borrowing; None if there is no limit."""
    share = None if shares is None else shares.of(user)
    if share is None:
        return None
    held = sum(claim.user == user and not claim.borrowed for claim in claims.values())
    return max(0, share - held)
