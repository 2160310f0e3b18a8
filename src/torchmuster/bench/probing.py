"""A program that measures, run on fresh ranks of this machine: asked in our types, answered in our types."""

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
    """Run a module of ours as so many ranks, tell each the request, and return what they answer, by rank.

    The program's ``main`` is given two words: the file that holds the request, and the folder for
    ``fresh_ranks.leave_answer``. ``say`` hears every ten seconds that it goes on. A rank that fails ends all;
    what became of it is in the error.
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
            why=f"{len(ran.texts)} of {ranks} ranks told what they saw",
            fix="try again; nothing was kept of it",
        )
    return [msgspec.json.decode(ran.texts[rank], type=answer) for rank in range(ranks)]
