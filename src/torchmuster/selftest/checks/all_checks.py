"""All checks, in the order in which they run: what later ones rely on comes first."""

from torchmuster.selftest.check import Check
from torchmuster.selftest.checks import communication, measuring, planning, saving, training

CHECKS: tuple[Check, ...] = (
    *training.CHECKS,
    *saving.CHECKS,
    *planning.CHECKS,
    *communication.CHECKS,
    *measuring.CHECKS,
)
