"""How many files this process may have open: each machine that takes part needs some."""

import sys

from torchmuster.errors import Impossible

# For everything else that the launcher has open.
_SPARE = 256


def make_room_for(needed: int, *, wanted: int) -> int:
    """Raise this process's own limit, never lower it, so that ``needed`` open files fit.

    Returns how many of the ``wanted`` further ones fit too.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if needed + _SPARE > room:
        raise Impossible(
            f"{needed} open files for connections do not fit: this user may have {hard}",
            why=f"each machine takes some, and there are others ({_SPARE})",
            fix=f"sudo prlimit --pid $$ --nofile={needed + _SPARE}  # then start it again",
        )
    target = min(needed + wanted + _SPARE, room)
    if target > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return min(wanted, max(soft, target) - needed - _SPARE)
