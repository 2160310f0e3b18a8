"""Slow because each sample comes from a slow storage, and nobody reads ahead."""

from ordinary import Samples, Training, options

if __name__ == "__main__":
    told = options()
    workers = (told.value or 4) if told.mended else 0
    Training(dataset=Samples(read_s=1e-4), workers=workers).run(told.steps)
