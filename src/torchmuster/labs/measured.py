"""What a lab's measurements are told in: tables, curves and bars."""

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Figures in rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One curve."""

    name: str
    points: list[tuple[float, float]]


class Curves(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Curves over one axis; units as in ``pages.figures.amount``."""

    title: str
    x: str
    y: str
    series: list[Series]
    x_unit: str = ""
    y_unit: str = ""
    x_log: bool = False


class Bars(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Values to be compared."""

    title: str
    unit: str
    values: dict[str, float]


Part = Table | Curves | Bars
