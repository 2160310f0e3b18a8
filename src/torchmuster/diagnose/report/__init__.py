"""Reports of a check: terminal text, JSON and HTML."""

from pathlib import Path

from torchmuster.diagnose.report.page import check_page
from torchmuster.diagnose.report.terminal import check_json, check_text, json_text
from torchmuster.diagnose.result import GroupResult, failing_hosts

__all__ = ["check_json", "check_page", "check_text", "write_check_report"]


def write_check_report(folder: Path, result: GroupResult) -> None:
    """Write check.json, report.html and failing-nodes.txt (one host per line) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(json_text(result), encoding="utf-8")
    (folder / "report.html").write_text(check_page(result), encoding="utf-8")
    failing = "".join(f"{host}\n" for host in failing_hosts(result))
    (folder / "failing-nodes.txt").write_text(failing, encoding="utf-8")
