"""The private names of torch that checks use."""

from typing import Any

# Private names, and what each is for:
# - torch.distributed.ProcessGroup._get_sequence_number_for_group: count the collectives that a rank has begun, to
#   name the ranks that a hanging check waits for; without it, a hanging check names no rank


def collectives_begun(group: Any) -> int:
    """Return how many collectives of a group this rank has begun; 0 if unknown."""
    count = getattr(group, "_get_sequence_number_for_group", int)
    return int(count())
