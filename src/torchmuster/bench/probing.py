"""Run a probe program on fresh local ranks, with typed request and answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from torchmuster.errors import MusterError
from torchmuster.plan.proof import fresh_ranks

T = TypeVar("T")


def run_probe(
    program: str,
    request: object,
    answer: type[T],
    *,
    ranks: int = 1,
    device: Literal["cpu", "gpu"] = "cpu",
    folder: str = ".",
    environment: dict[str, str] | None = None,
    doing: str,
    say: Callable[[str], None] = lambda _: None,
) -> list[T]:
    """Run a probe module on this number of ranks with a request, and return the answers by rank.

    The program's ``main`` gets two arguments: the request file, and the folder for
    ``fresh_ranks.leave_answer``. ``say`` is called every ten seconds with a progress text. A
    failing rank stops all ranks; the error contains its failure.
    """
    ran = fresh_ranks.run_fresh_ranks(
        program,
        msgspec.json.encode(request).decode(),
        ranks=ranks,
        device=device,
        folder=str(Path(folder).absolute()),
        name="bench",
        environment=environment,
        typed=("bench",),
        doing=doing,
        say=say,
    )
    if ran.trouble is not None:
        raise MusterError(
            f"{doing} failed", why=fresh_ranks.describe_failure(ran.trouble), fix=ran.trouble.fix
        )
    if len(ran.texts) != ranks:
        raise MusterError(
            f"{doing} failed",
            why=f"only {len(ran.texts)} of {ranks} ranks returned a result",
            fix="try again; no result was saved",
        )
    return [msgspec.json.decode(ran.texts[rank], type=answer) for rank in range(ranks)]
