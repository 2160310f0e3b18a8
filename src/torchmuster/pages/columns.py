"""Tables on the terminal."""

from collections.abc import Iterator, Sequence

from torchmuster.redaction import harmless


def aligned_columns(rows: Sequence[Sequence[str]], *, right: bool = False) -> Iterator[str]:
    """Align cells in columns; ``right`` aligns all but the first column to the right."""
    cells = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            line.append(cell.rjust(width) if right and number else cell.ljust(width))
        yield "  ".join(line).rstrip()
