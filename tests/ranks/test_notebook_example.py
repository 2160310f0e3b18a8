"""The notebook among the examples is executed as it lies there: a store and a worker, then ranks."""

import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

from patience import GIVE_UP_S

pytestmark = [pytest.mark.ranks, pytest.mark.integrations]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def test_all_gather_by_a_store_and_by_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "notebooks"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.setenv("STORE_PORT", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(folder / "all_gather.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=GIVE_UP_S, resources={"metadata": {"path": str(folder)}}
    ).execute()
    shown = {
        "".join(cell.source): "".join(
            output.get("text", "") + output.get("data", {}).get("text/plain", "")
            for output in cell.outputs
            if output.output_type != "display_data"  # how long it takes
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    by_store = next(text for code, text in shown.items() if "call-0" in code)
    assert "[rank 0] gathered=[0, 1] device=" in by_store
    assert by_store.endswith("[0, 1]")
    by_ranks = next(text for code, text in shown.items() if code.startswith("%%ranks"))
    assert sorted(by_ranks.splitlines()) == [
        "[all 2 ranks] [0, 1]",
        "[rank 0] gathered=[0, 1] device=cpu",
        "[rank 1] gathered=[0, 1] device=cpu",
    ]
