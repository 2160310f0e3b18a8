"""Reports of a check: terminal text, JSON, SVG and HTML."""

from pathlib import Path

from torchmuster.diagnose.report.grid import grid_of_hosts, grid_of_ranks, heat_map
from torchmuster.diagnose.report.page import check_page
from torchmuster.diagnose.report.terminal import check_json, check_text, json_text
from torchmuster.diagnose.result import GroupResult

__all__ = ["check_json", "check_page", "check_text", "write_check_report"]


def write_check_report(folder: Path, result: GroupResult) -> None:
    """Write check.json, report.html and, if links were measured, links.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(json_text(result), encoding="utf-8")
    (folder / "report.html").write_text(check_page(result), encoding="utf-8")
    grid = grid_of_hosts(result) or grid_of_ranks(result)
    if grid is not None:
        (folder / "links.svg").write_text(heat_map(grid), encoding="utf-8")
