"""What cannot be followed without values, refused by its name."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchmuster.errors import Impossible
from torchmuster.plan.probes.live_storage import LiveStorages
from torchmuster.plan.torch_private import CANNOT_FOLLOW, READ_VALUE


@contextmanager
def named_refusals(seen: LiveStorages) -> Iterator[None]:
    """Refuse by name what a model does that cannot be followed without values."""
    try:
        yield
    except CANNOT_FOLLOW as error:
        where = f"in {seen.lost_in}" if seen.lost_in else "outside of its modules"
        raise Impossible(
            f"this model cannot be followed without values: {where}, {seen.stages.now.phase}",
            why=f"{_operation(error)} depends on what is in a tensor, or torch cannot tell what comes out",
            fix="plan with an estimate, which has a wider band; or keep .item(), nonzero() and the like out "
            "of the forward",
        ) from error


def _operation(error: BaseException) -> str:
    named = str(getattr(error, "func", None) or (error.args[0] if error.args else error))
    return (
        f"{named} (.item(), float() or an if)"
        if READ_VALUE.overloadpacket.__name__ in named
        else named
    )
