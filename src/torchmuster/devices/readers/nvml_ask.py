"""Putting one question to NVML: what an error in the answer means for the card."""

from collections.abc import Callable
from typing import Any

import pynvml

# What a card or driver may lack without anything being wrong.
_NOT_AVAILABLE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
# A card that answers so is gone, whatever it was asked.
_GONE = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})


class Unreachable(Exception):
    """The device no longer answers."""


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Ask what must be known to use a card; None if this card or driver cannot say."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _NOT_AVAILABLE:
            return None
        raise Unreachable(str(error)) from error


def measure(question: Callable[..., Any], *arguments: Any) -> Any:
    """Ask for a reading that no choice depends on: a broken sensor is not yet a broken card."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise Unreachable(str(error)) from error
        return None
