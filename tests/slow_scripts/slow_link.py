"""A network that is slower than this machine's own: what is sent takes as long as it would there."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class SlowLink:
    """Sends one message after the other, each as slowly as the link is, beside the computing."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def use(self, model: DistributedDataParallel) -> None:
        """Have a model's gradients go over this link."""
        model.register_comm_hook(None, self._send)

    def _send(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        begin_s = max(time.monotonic(), self._free_at_s)
        self._free_at_s = begin_s + gradients.nbytes / self._bytes_per_s
        arrives_at_s = self._free_at_s
        arrived: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        summed = dist.all_reduce(gradients, async_op=True).get_future()

        def arrive() -> None:
            value = summed.wait()[0]
            time.sleep(max(0.0, arrives_at_s - time.monotonic()))
            arrived.set_result(value.div_(dist.get_world_size()))

        threading.Thread(target=arrive).start()
        return arrived
