"""Slow because a step has too few samples to make up for what it costs in any case."""

from ordinary import Training, options

if __name__ == "__main__":
    told = options()
    Training(batch=16 * (told.value or 8) if told.mended else 16).run(told.steps)
