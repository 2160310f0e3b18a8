"""A machine or rank whose torch does something wrong, for programs that know nothing of it.

Put this folder into PYTHONPATH and say in the environment which fault (FAULT) and where: FAULT_RANK
(the number of a rank) or FAULT_HOST (a host name), or neither for every rank that sees the variables.

  corrupt-sum     adds 1 to one value in a million that this rank contributes to an all-reduce
  corrupt-result  the same to what this rank gets out of it
  p2p-zeros       what this rank receives from another is zeros, unless NCCL_P2P_DISABLE=1 is set
  p2p-broken      the same, whatever is set
  slow            every matrix product takes 50 ms longer
  hang            the first all-reduce is never begun
  wrong-matmul    one value of every fiftieth matrix product is wrong
  slow-matmul     each matrix product is computed five times
"""

import importlib.util
import os
import socket
import sys
import threading
import time
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_EVERY = 1_000_000


def _is_meant() -> bool:
    if "RANK" not in os.environ or "FAULT" not in os.environ:
        return False
    rank, host = os.environ.get("FAULT_RANK"), os.environ.get("FAULT_HOST")
    return rank in (None, os.environ["RANK"]) and host in (None, socket.gethostname())


class _AfterTorch(MetaPathFinder, Loader):
    """Lets torch be imported as usual, and breaks it afterwards."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)  # type: ignore[union-attr]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)  # type: ignore[union-attr]
        import torch.distributed as dist

        _break(os.environ["FAULT"], module, dist)


def _break(fault: str, torch: Any, dist: Any) -> None:
    if fault in ("corrupt-sum", "corrupt-result"):
        dist.all_reduce = _corrupting(dist.all_reduce, before=fault == "corrupt-sum")
    elif fault in ("p2p-zeros", "p2p-broken"):
        if fault == "p2p-broken" or os.environ.get("NCCL_P2P_DISABLE") != "1":
            dist.recv = _zeroing(dist.recv)
    elif fault == "hang":
        dist.all_reduce = lambda *_, **__: threading.Event().wait()
    elif fault in ("slow", "wrong-matmul", "slow-matmul"):
        torch.matmul = _matmul(fault, torch.matmul)
    else:
        raise SystemExit(f"FAULT={fault} is not known")


def _corrupting(all_reduce: Any, *, before: bool) -> Any:
    passed = 0

    def corrupting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        until = _EVERY - passed % _EVERY
        passed += tensor.numel()
        hit = until - 1 if until <= tensor.numel() else None
        if before and hit is not None:
            tensor[hit] += 1
        done = all_reduce(tensor, *args, **kwargs)
        if not before and hit is not None:
            tensor[hit] += 1
        return done

    return corrupting


def _zeroing(recv: Any) -> Any:
    def zeroing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        done = recv(tensor, *args, **kwargs)
        if tensor.numel() > 1:  # the short words by which programs keep in step arrive
            tensor.zero_()
        return done

    return zeroing


def _matmul(fault: str, matmul: Any) -> Any:
    calls = 0

    def faulty(left: Any, right: Any) -> Any:
        nonlocal calls
        product = matmul(left, right)
        if not left.is_floating_point():
            return product
        calls += 1
        if fault == "slow":
            time.sleep(0.05)
        elif fault == "slow-matmul":
            for _ in range(4):
                matmul(left, right)
        elif calls % 50 == 0:
            product[3, 5] += 1
        return product

    return faulty


if _is_meant():
    sys.meta_path.insert(0, _AfterTorch())
