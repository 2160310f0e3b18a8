"""``from torchmuster import …``: every name, its type and its signature; frozen, and without torch until it is used.

If a change is meant, renew the snapshot and the stub:
``pytest tests/engine/test_public_api.py --snapshot-update``.
"""

import inspect
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import torchmuster
from text_snapshots import TextFile
from torchmuster import distributed

STUB = Path(torchmuster.__file__).with_suffix(".pyi")


def test_names_and_signatures_are_frozen(snapshot: SnapshotAssertion) -> None:
    lines = []
    for name in torchmuster.__all__:
        parameters = inspect.signature(getattr(torchmuster, name)).parameters.values()
        lines.append(f"{name}({', '.join(_shown(one) for one in parameters)})")
    assert "\n".join(lines) + "\n" == snapshot.use_extension(TextFile)


def _shown(parameter: inspect.Parameter) -> str:
    """Return what a caller must know; annotations are written differently by versions of Python."""
    mark = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "name: "}
    default = "" if parameter.default is inspect.Parameter.empty else "=…"
    return f"{mark.get(parameter.kind.name, '')}{parameter.name}{default}"


def test_type_checkers_see_the_same_names(pytestconfig: pytest.Config) -> None:
    by_module: dict[str, list[str]] = defaultdict(list)
    for name, module in torchmuster._MODULES.items():
        by_module[module].append(name)
    lines = ["# Written by tests/engine/test_public_api.py: pytest --snapshot-update renews it."]
    lines += [
        f"from {module} import {name} as {name}"
        for module in sorted(by_module)
        for name in sorted(by_module[module])
    ]
    lines += [
        "",
        "__all__: list[str]",
        "__version__: str",
        "_MODULES: dict[str, str]",
        "",
        "def load_ipython_extension(shell: object) -> None: ...",
    ]
    text = "\n".join(lines) + "\n"
    if pytestconfig.getoption("update_snapshots"):
        STUB.write_text(text)
    assert STUB.read_text() == text


def test_the_functions_of_distributed_are_there_too() -> None:
    functions = set(distributed.__all__) - {"GpuIds"}
    assert functions <= set(torchmuster.__all__)
    assert all(getattr(torchmuster, name) is getattr(distributed, name) for name in functions)


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys, torchmuster; dir(torchmuster); print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert [one for one in loaded if one.startswith("torch")] == ["torchmuster"]
