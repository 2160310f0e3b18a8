"""Measured amounts as people read them."""

from torchmuster.units import format_bytes

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def amount(value: float, unit: str) -> str:
    """Write an amount with three figures and its unit: ``1.24 ms``, ``87.1 GFLOP/s``, ``79.2 GiB``.

    ``1`` is the unit of what has none, ``%`` that of a share; a unit that is not one of a record's stands as it is.
    """
    if unit == "B":
        return format_bytes(round(value))
    if unit in ("1", ""):
        return f"{value:,.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.3g}"
    if unit == "%":
        return f"{value:.3g} %"
    if unit == "s":
        size, name = next((one for one in _SMALL if abs(value) >= 0.9995 * one[0]), _SMALL[-1])
        return f"{_three(value / size)} {name}" if value else "0 s"
    if unit in ("B/s", "FLOP/s"):
        size, prefix = next((one for one in _LARGE if abs(value) >= 0.9995 * one[0]), (1.0, ""))
        return f"{_three(value / size)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def tick(value: float, unit: str) -> str:
    """Write a round amount at an axis, without the zeros that say how exact it is."""
    if value == 0:
        return "0"
    number, space, name = amount(value, unit).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{space}{name}"


def _three(value: float) -> str:
    """Three figures without an exponent, more before the point."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
