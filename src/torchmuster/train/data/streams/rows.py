"""One row of tokens for a language model, with what may be learnt from it.

A row is a dictionary of tensors, all of one length:

``input_ids``
    the tokens; each text is followed by the end token
``labels``
    the same tokens at the same places (the loss shifts them), or the labels that came with them; -100 where a
    token is not learnt: the first of a document and the first of a row, which have nothing before them,
    and padding
``position_ids``
    begin at 0 with each document and each row. A packed row has no attention mask: models of
    transformers take a new 0 for the beginning of a document that sees nothing before it
``attention_mask``
    only in padded rows: 1 for tokens, 0 for padding
"""

from collections.abc import Mapping, Sequence

import torch

from torchmuster.train.losses import IGNORED

Row = dict[str, torch.Tensor]


def row_of(
    tokens: torch.Tensor,
    begins: Sequence[int],
    length: int,
    *,
    masked: bool,
    labels: Mapping[int, Sequence[int]] | None = None,
) -> Row:
    """Make a row of ``length`` from tokens; documents begin in it at the places ``begins``.

    ``labels`` replace the tokens as what is learnt, from each place of theirs on.
    """
    filled = len(tokens)
    input_ids = tokens
    if filled < length:
        # Padding is a document of its own that nobody learns; which token it repeats makes no difference.
        input_ids = torch.cat([tokens, tokens[-1].expand(length - filled)])
        begins = [*begins, filled]
    learnt = input_ids.clone()
    for place, values in (labels or {}).items():
        learnt[place : place + len(values)] = torch.tensor(values)
    learnt[[0, *begins]] = IGNORED
    learnt[filled:] = IGNORED
    row = {"input_ids": input_ids, "labels": learnt, "position_ids": _positions(begins, length)}
    if masked:
        row["attention_mask"] = (torch.arange(length) < filled).long()
    return row


def _positions(begins: Sequence[int], length: int) -> torch.Tensor:
    places = torch.arange(length)
    if not begins:
        return places
    last_begin = torch.zeros(length, dtype=torch.int64)
    last_begin[list(begins)] = torch.tensor(begins)
    return places - last_begin.cummax(0).values
