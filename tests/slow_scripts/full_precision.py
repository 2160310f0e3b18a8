"""Slow because products of large matrices are computed in 32 bits where 16 would do."""

from functools import partial

import torch
from ordinary import Training, network, options, samples

if __name__ == "__main__":
    told = options()
    training = Training(
        model=network(width=2048, layers=2), dataset=samples(width=2048, count=1024), batch=256
    )
    if told.mended:
        training.around_forward = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    training.run(told.steps)
