"""What a check found, as text, tables, pictures and pages."""

from pathlib import Path

from torchmuster.diagnose.report.document import as_json, to_text
from torchmuster.diagnose.report.grid import of_machines, of_ranks
from torchmuster.diagnose.report.heat_map import heat_map
from torchmuster.diagnose.report.page import page
from torchmuster.diagnose.report.terminal import text
from torchmuster.diagnose.result import GroupResult

__all__ = ["as_json", "page", "text", "write"]


def write(folder: Path, result: GroupResult) -> None:
    """Write check.json, report.html and, where something was measured, links.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(to_text(result), encoding="utf-8")
    (folder / "report.html").write_text(page(result), encoding="utf-8")
    grid = of_machines(result) or of_ranks(result)
    if grid is not None:
        (folder / "links.svg").write_text(heat_map(grid), encoding="utf-8")
