"""Numbers on their way from the device to the host, which reads them later without stopping the device."""

import torch


class HostCopy:
    """A copy of a few numbers that the device has yet to compute.

    Reading it waits until the device has come this far, not until it has nothing left to do: whoever has given the
    device more work in the meantime leaves it busy.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._numbers = numbers
        if numbers.device.type not in ("cpu", "mps"):  # whose memory the host can read
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.Event(numbers.device)
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._numbers.tolist()
        return found
