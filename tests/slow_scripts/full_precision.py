"""Slow because products of large matrices are computed in 32 bits where 16 would do."""

from ordinary import Training, options

if __name__ == "__main__":
    told = options()
    Training(bf16=told.mended).run(told.steps)
