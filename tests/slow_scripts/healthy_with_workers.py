"""A training with nothing to mend: samples that take time to read, and workers that read them beforehand."""

from ordinary import Samples, Training, options

if __name__ == "__main__":
    Training(dataset=Samples(read_s=1e-5), workers=2).run(options().steps)
