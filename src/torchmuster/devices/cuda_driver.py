"""Whether it is too late to choose GPUs in this process, because the CUDA driver has started."""

import ctypes
import os

_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED


def cuda_has_started() -> bool:
    """Ask the driver library if it is loaded; neither loads nor starts it.

    The driver reads ``CUDA_VISIBLE_DEVICES`` when it starts. ``torch.cuda.is_available()`` is enough
    for that, although ``torch.cuda.is_initialized()`` is still false then.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALISED)
