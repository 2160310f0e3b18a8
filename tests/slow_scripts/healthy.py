"""A training with nothing to mend."""

from ordinary import Training, options

if __name__ == "__main__":
    Training().run(options().steps)
