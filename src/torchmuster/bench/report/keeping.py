"""What a bench leaves in its folder: the record, the page, and each picture as a file of its own."""

import re
from pathlib import Path

from torchmuster.bench import record
from torchmuster.bench.report.page import page
from torchmuster.bench.report.report import Report
from torchmuster.errors import Impossible
from torchmuster.runfolder import write_atomically

PAGE = "report.html"


def keep(report: Report, folder: Path) -> Path:
    """Write everything into a folder, which is made where it is missing; return the page's path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record.write(folder / record.FILE, report.record)
        for picture in report.pictures:
            name = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-") or "picture"
            write_atomically(folder / f"{name}.svg", picture.svg)
        write_atomically(folder / PAGE, page(report))
    except OSError as error:
        raise Impossible(
            f"cannot write to {folder}",
            why=error.strerror or str(error),
            fix="give another folder with --out, on a disk with room",
        ) from error
    return folder / PAGE
