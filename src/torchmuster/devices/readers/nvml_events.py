"""Count NVIDIA's critical errors (Xid), which NVML reports only to a listener that is active.

Earlier errors are not available from NVML; the kernel log has them.
"""

import ctypes
import dataclasses
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pynvml

from torchmuster.devices.model import Device, DeviceKind

# A failing GPU may report thousands of events; events beyond this wait for the next snapshot.
_MOST_AT_A_LOOK = 256
# Distinct Xid numbers kept per GPU; a GPU has a handful in its life.
_MOST_NUMBERS = 32
OTHER = 0  # not an Xid: counts all further numbers
_PATIENCE_S = 2.0

# Errors of the program, after which the GPU still works: NVIDIA's device plug-in for Kubernetes
# ignores the same ones.
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


class XidErrors:
    """Count the Xid events of all GPUs while the context is open."""

    def __init__(self) -> None:
        self._set: Any = None
        self._turn = threading.Lock()  # one thread may read while another one closes
        self._over = False
        self._uuids: dict[int | None, str] = {}  # by NVML's handle
        # By UUID; has an entry for every GPU with a listener.
        self._heard: dict[str, Counter[int]] = {}

    def __enter__(self) -> "XidErrors":
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        if not self._turn.acquire(timeout=_PATIENCE_S):
            return  # the driver does not answer: the rest is released when the process exits
        try:
            if self._set is not None:
                with suppress(pynvml.NVMLError):  # the driver was unloaded meanwhile
                    pynvml.nvmlEventSetFree(self._set)
                with suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
                self._set = None
        finally:
            self._turn.release()

    def added_to(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return the devices with the errors counted for each so far."""
        with self._turn:
            if self._set is None and any(device.kind is DeviceKind.CUDA for device in devices):
                self._listen()  # the driver was loaded after us
            self._catch_up()
        return tuple(
            dataclasses.replace(device, xid_errors=tuple(sorted(self._heard[device.uuid].items())))
            if device.uuid in self._heard
            else device
            for device in devices
        )

    def _listen(self) -> None:
        if self._over:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return  # the device reader reports why
        try:
            self._set = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                with suppress(pynvml.NVMLError):  # this GPU has no events, or does not answer
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
                return  # no more events, which NVML calls a timeout; or a lost GPU
            # Do not query the GPU: one that has fallen off the bus does not answer.
            counts = self._heard.get(self._uuids.get(_address(event.device), ""))
            if counts is not None:
                number = int(event.eventData)
                known = number in counts or len(counts) < _MOST_NUMBERS
                counts[number if known else OTHER] += 1


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
