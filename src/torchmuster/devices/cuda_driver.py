"""Detect whether the CUDA driver has started, which makes it too late to choose GPUs."""

import ctypes
import os

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def cuda_has_started() -> bool:
    """Return whether the CUDA driver has started in this process; neither loads nor starts it.

    The driver reads ``CUDA_VISIBLE_DEVICES`` when it starts. ``torch.cuda.is_available()`` starts
    it, although ``torch.cuda.is_initialized()`` is still false then.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
