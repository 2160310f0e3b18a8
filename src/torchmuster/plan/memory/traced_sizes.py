"""Which micro-batch sizes are traced, so that others can be computed from them.

Memory is a straight line over the micro-batch size, but for two borders. A single sample is a size of its own: a dimension
of 1 can lie anywhere, so copies are left out. And the loss of language models works in parts once its logits are
many. A line is drawn between sizes of the same side only.
On a CPU there is no such line: oneDNN takes other ways, with other copies, for other sizes.
"""

from typing import Literal

from torchmuster.plan.job import Work
from torchmuster.plan.memory.model_configuration import configuration

WHOLE_ELEMENTS = 2**24  # of logits that the loss takes at once, as train/losses.py has it


def traced_sizes(
    work: Work, micro_batch_size: int, *, kernels: Literal["cpu", "cuda"]
) -> tuple[int, ...]:
    """Return one or two micro-batch sizes that say what this one takes."""
    if micro_batch_size == 1 or kernels == "cpu":
        return (micro_batch_size,)
    if not _loss_has_parts(work):
        return (2, 3)
    border = _largest_whole(work)
    if border is None:
        # What is not known may lie anywhere: between two near sizes it cannot do much harm.
        low = 1 << (micro_batch_size.bit_length() - 1)
        return (low,) if low == micro_batch_size else (low, 2 * low)
    if micro_batch_size > border:
        low = max(border + 1, 2)
        return (low, low + 1)
    return (2, 3) if border > 2 else (2,)


def _loss_has_parts(work: Work) -> bool:
    usual = "language_model" if work.model_name_or_path else "cross_entropy"
    return (work.loss or usual) == "language_model"


def _largest_whole(work: Work) -> int | None:
    """Return the most samples whose loss is taken at once; None where that cannot be read."""
    told = configuration(work)
    vocabulary = None if told is None else told.get("vocab_size")
    if not isinstance(vocabulary, int) or work.sequence_length is None:
        return None
    return max(1, WHOLE_ELEMENTS // vocabulary) // work.sequence_length
