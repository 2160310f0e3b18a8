"""NVIDIA's critical errors (Xid), which NVML tells only to those who listen while they happen.

What came before somebody listened is lost to NVML; the kernel's log has it.
"""

import ctypes
import dataclasses
import threading
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Any

import pynvml

from torchmuster.devices.model import Device, DeviceKind

# A card that fails may report thousands; what a look leaves, the next ones take.
_MOST_AT_A_LOOK = 256
# The numbers of one card that are told apart; a card has a handful in its life.
_MOST_NUMBERS = 32
OTHER = 0  # is no Xid: stands for those beyond that
_PATIENCE_S = 2.0

# Errors of the program on the card, after which the card is as good as before: NVIDIA's own plug-in for
# Kubernetes passes over the same ones.
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


class XidErrors:
    """Listens to all cards from the moment it is entered, and counts."""

    def __init__(self) -> None:
        self._set: Any = None
        self._turn = threading.Lock()  # a look may be taken in one thread while another one ends it
        self._over = False
        self._uuids: dict[int | None, str] = {}  # by NVML's handle
        # By UUID; there for every card that is listened to.
        self._heard: dict[str, Counter[int]] = {}

    def __enter__(self) -> "XidErrors":
        self._listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        if not self._turn.acquire(timeout=_PATIENCE_S):
            return  # the driver does not answer: what is left ends with the process
        try:
            if self._set is not None:
                with suppress(pynvml.NVMLError):  # a driver that went away meanwhile
                    pynvml.nvmlEventSetFree(self._set)
                with suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
                self._set = None
        finally:
            self._turn.release()

    def added_to(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return the devices with what was heard of each so far."""
        with self._turn:
            if self._set is None and any(one.kind is DeviceKind.CUDA for one in devices):
                self._listen()  # the driver was loaded after us
            self._catch_up()
        return tuple(
            dataclasses.replace(one, xid_errors=tuple(sorted(self._heard[one.uuid].items())))
            if one.uuid in self._heard
            else one
            for one in devices
        )

    def _listen(self) -> None:
        if self._over:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return  # whoever reads the devices says why
        try:
            self._set = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                with suppress(pynvml.NVMLError):  # this card has no events, or does not answer
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = pynvml.nvmlDeviceGetUUID(handle)
                    pynvml.nvmlDeviceRegisterEvents(
                        handle, pynvml.nvmlEventTypeXidCriticalError, self._set
                    )
                    self._uuids[_address(handle)] = uuid
                    self._heard.setdefault(uuid, Counter())
        except pynvml.NVMLError:
            if self._set is None:
                with suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()

    def _catch_up(self) -> None:
        if self._set is None:
            return
        for _ in range(_MOST_AT_A_LOOK):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError:
                return  # nothing more, which NVML calls a timeout; or a card that is gone
            # Not asked of the card: one that has fallen off the bus says nothing any more.
            counts = self._heard.get(self._uuids.get(_address(event.device), ""))
            if counts is not None:
                number = int(event.eventData)
                known = number in counts or len(counts) < _MOST_NUMBERS
                counts[number if known else OTHER] += 1


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
