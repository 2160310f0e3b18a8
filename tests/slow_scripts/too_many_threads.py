"""Slow because every rank computes with far more threads than it has cores."""

import torch
from ordinary import Training, options

if __name__ == "__main__":
    told = options()
    torch.set_num_threads((told.value or 1) if told.mended else 16)
    Training().run(told.steps)
