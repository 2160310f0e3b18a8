"""Whether a model keeps the documents of a packed row apart: tried, not assumed.

A packed row has no attention mask; a model must tell its documents apart by ``position_ids``. Most
models of transformers do. OPT, BLOOM, MPT, Mamba and RWKV do not, and would train on mixed documents.
"""

import copy
from typing import Any

import torch
from torch import nn

from torchmuster.errors import first_line

FIRST, SECOND = 24, 8  # tokens of the two documents
TOLERANCE = 1e-4  # of the largest logit, in float32


def mixed_documents(model: nn.Module, vocabulary: int) -> str | None:
    """Return why a model cannot be trained on packed rows; None if it can.

    The second document of a row must have the same logits as alone, whatever the first one is.
    """
    generator = torch.Generator().manual_seed(0)
    second = torch.randint(vocabulary, (1, SECOND), generator=generator)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = _logits(model, [second])
            for _ in range(2):
                first = torch.randint(vocabulary, (1, FIRST), generator=generator)
                in_row = _logits(model, [first, second])[:, FIRST:]
                apart = float((in_row - alone).abs().max() / alone.abs().max())
                if not apart <= TOLERANCE:
                    return f"the logits of a document change by {apart:.1%} after another one"
    except (TypeError, ValueError, RuntimeError) as error:
        return f"a packed row fails: {first_line(error)}"
    finally:
        model.train(was_training)
    return None


def _logits(model: nn.Module, documents: list[torch.Tensor]) -> torch.Tensor:
    positions = [torch.arange(document.shape[1])[None] for document in documents]
    output = model(input_ids=torch.cat(documents, 1), position_ids=torch.cat(positions, 1))
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits.float()


def smaller(config: Any) -> Any:
    """Return a config of the same architecture with one layer of each kind and a small vocabulary."""
    config = copy.deepcopy(config)
    kinds = list(getattr(config, "layer_types", None) or ["layer"])
    layers = max(2, *(1 + kinds.index(kind) for kind in kinds))  # RWKV divides by layers - 1
    if len(set(kinds)) > 1:
        config.layer_types = kinds[:layers]
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    special = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    known = [token for token in special if isinstance(token, int)]
    config.vocab_size = max([128, *(token + 1 for token in known)])
    config.use_cache = False
    return config
