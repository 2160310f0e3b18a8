"""Wrap functions that libraries import by name, before a library is imported; the trial is chosen later.

Imported by the process from which ranks are forked.
"""

import torch

from torchmuster.prove.probes import isolation

# The first optimizer of a process imports torch's compiler, which takes seconds.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
isolation.block_uploads()
