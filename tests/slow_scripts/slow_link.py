"""A network that is slower than this machine's own: what is sent takes as long as it would there."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from ordinary import HAS_FAST_BF16, INPUTS
from torch.nn.parallel import DistributedDataParallel

_TRIES = 5


class SlowLink:
    """Sends one message after the other, each as slowly as the link is, beside the computing.

    Sending all gradients takes a share of the time that computing them takes, whatever machine this is.
    """

    def __init__(self, *, share_of_computing: float, batch: int) -> None:
        self._share = share_of_computing
        self._batch = batch
        self._bytes_per_s = 0.0
        self._free_at_s = 0.0

    def use(self, model: DistributedDataParallel) -> None:
        """Have a model's gradients go over this link."""
        gradients = sum(one.nbytes for one in model.parameters())
        computing_s = torch.tensor(min(self._computing_s(model) for _ in range(_TRIES)))
        dist.all_reduce(computing_s, op=dist.ReduceOp.MAX)
        self._bytes_per_s = gradients / (self._share * computing_s.item())
        model.register_comm_hook(None, self._send)

    def _computing_s(self, model: DistributedDataParallel) -> float:
        """Return what a forward and a backward take that send nothing."""
        inputs = torch.randn(self._batch, INPUTS)
        dist.barrier()
        begun_s = time.perf_counter()
        bf16 = torch.autocast("cpu", dtype=torch.bfloat16, enabled=HAS_FAST_BF16)
        with model.no_sync(), bf16:
            model(inputs).sum().backward()
        took_s = time.perf_counter() - begun_s
        model.zero_grad()
        return took_s

    # DDP looks at the types of a hook.
    def _send(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
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
