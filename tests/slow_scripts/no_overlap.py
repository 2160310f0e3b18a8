"""Slow because all gradients are sent in one message at the end, when nothing is left to compute meanwhile."""

from ordinary import Training, options
from slow_link import SlowLink

_BATCH = 2048

if __name__ == "__main__":
    told = options()
    Training(
        batch=_BATCH,
        ddp={"bucket_cap_mb": (told.value or 4) if told.mended else 1000},
        prepare=SlowLink(share_of_computing=0.65, batch=_BATCH).use,
    ).run(told.steps)
