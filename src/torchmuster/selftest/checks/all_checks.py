"""All checks, in the order in which they run: what later ones rely on comes first."""

from torchmuster.selftest.check import Check
from torchmuster.selftest.checks import (
    communication,
    devices,
    measuring,
    planning,
    saving,
    training,
)

CHECKS: tuple[Check, ...] = (
    *devices.CHECKS,
    *communication.CHECKS,
    *training.CHECKS,
    *saving.CHECKS,
    *planning.CHECKS,
    *measuring.CHECKS,
)
