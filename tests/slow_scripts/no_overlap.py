"""Slow because all gradients are sent in one message at the end, when nothing is left to compute meanwhile."""

from ordinary import Training, options
from slow_link import SlowLink

if __name__ == "__main__":
    told = options()
    Training(
        ddp={"bucket_cap_mb": (told.value or 4) if told.mended else 1000},
        prepare=SlowLink(share_of_computing=0.6, batch=Training.batch).use,
    ).run(told.steps)
