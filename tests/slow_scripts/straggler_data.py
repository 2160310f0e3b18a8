"""Slow because one rank's storage is slower than the others'."""

from ordinary import RANK, Samples, Training, options

if __name__ == "__main__":
    told = options()
    slow = RANK == 1 and not told.mended
    Training(dataset=Samples(read_s=5e-5 if slow else 0.0)).run(told.steps)
