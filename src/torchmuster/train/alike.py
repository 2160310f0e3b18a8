"""What all ranks must have been told alike, compared before anything is built on it."""

from collections.abc import Mapping

from torchmuster.errors import Impossible
from torchmuster.train.agreement import tell_all
from torchmuster.train.world import World


def refuse_differences(settings: Mapping[str, object], world: World) -> None:
    """End all ranks, with the same words, if one of them was started with other settings."""
    told = tell_all({name: repr(value) for name, value in settings.items()}, world)
    for rank, theirs in enumerate(told):
        different = [name for name in theirs if theirs[name] != told[0][name]]
        if different:
            name = different[0]
            raise Impossible(
                f"rank {rank} has other settings than rank 0: {name} is {theirs[name]}, "
                f"not {told[0][name]}",
                why=f"settings that differ: {len(different)}; all ranks must train the same",
                fix="start all ranks with the same file, flags and TORCHMUSTER_ variables",
            )
