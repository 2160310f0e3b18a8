"""Private names of torch are used in one file of a package, each with its reason; a page lists them."""

from pathlib import Path

import pytest

import torchmuster
from architecture.private_names import FILE, Use, declared, is_private, uses
from torchmuster.torch_internals import RUN_ON

ROOT = Path(torchmuster.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "torch-internals.md"
FILES = sorted(ROOT.rglob(FILE))


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = [
        f"{one.path.relative_to(ROOT)}:{one.line}: {one.name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != FILE
        for one in uses(path)
    ]
    assert found == []


def test_each_package_has_one_such_file() -> None:
    assert [path.relative_to(ROOT).parts[1:] for path in FILES] == [(FILE,)] * len(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_its_table_has_every_name_that_it_uses_and_no_other(path: Path) -> None:
    table = {one.name for one in declared(path)}
    used = list(uses(path))
    assert [one for one in used if not any(_is(name, one) for name in table)] == []
    # A name may be used by a method that torch calls, as well as by an expression.
    text = path.read_text()
    unused = {name for name in table if not any(_is(name, one) for one in used)}
    assert [name for name in unused if f"def {name.rpartition('.')[2]}(" not in text] == []


def _is(name: str, use: Use) -> bool:
    """Say whether a use may be of a name: torch's path to it, or the private end of that."""
    if use.name.startswith("torch."):
        return (
            name == use.name or name.startswith(f"{use.name}.") or use.name.startswith(f"{name}.")
        )
    return use.last in name.split(".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_name_is_private_and_says_what_it_is_for(path: Path) -> None:
    for one in declared(path):
        assert one.name.startswith("torch.")
        assert any(map(is_private, one.name.split("."))), one.name
        assert one.use[0].islower(), one.name
        assert not one.use.endswith("."), one.name
        assert one.run_on, one.name


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "import torch._C as c",
        "from torch._subclasses import fake_tensor",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "import torch\nx = torch._foreach_norm",
        "from torch import nn\nnn.init._no_grad_trunc_normal_ = 1",
        "import torch\n_aten = torch.ops.aten\nx = _aten._safe_softmax.default",
        "def f(storage):\n    return storage._cdata",
        "def f(model):\n    return model.layer()._parameters",
        "import torch\nclass A(torch.nn.Module):\n    def f(self):\n        return self._buffers",
        "def f(module):\n    return getattr(module, '_orig_mod', None)",
        "def f(module, put):\n    put(module, '_apply', 1)",
        "import sys\nx = sys.modules['torch._C._distributed_c10d']",
    ],
)
def test_each_kind_of_use_is_seen(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.py").write_text(line + "\n")
    assert list(uses(tmp_path / "x.py"))


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos._exit(1)",
        "import torch\nx = torch.nn.Module()",
        "from torchmuster.train import weights\nweights._own()",
        "class A:\n    def __init__(self):\n        self._own = 1\n    def f(self, other):\n        return other._own",
        "def _own(): ...\nx = getattr(1, '_own')",
        "x = 'look at torch._C._distributed_c10d in each rank'",
        "from pathlib import Path as _Path",
    ],
)
def test_what_is_not_torch_s_is_left_alone(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.py").write_text(line + "\n")
    assert list(uses(tmp_path / "x.py")) == []


def test_the_page_lists_them_all(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--snapshot-update"):
        PAGE.write_text(_page(), encoding="utf-8")
    assert _page() == PAGE.read_text(encoding="utf-8")


def _page() -> str:
    versions = ", ".join(RUN_ON)
    lines = [
        "# Private names of torch",
        "",
        "<!-- Written by tests/architecture/test_torch_private.py: pytest --snapshot-update renews it. -->",
        "",
        "Muster uses the private torch names below. torch may change them in any version, so each package has one file for them",
        "(`src/torchmuster/*/torch_private.py`). The column *without it* shows what happens if torch lacks the name: a fallback, or an",
        "error when the command starts.",
        "",
        f"Tested with torch {versions}. If a name was tested with other versions, its row lists them.",
    ]
    for path in FILES:
        lines += [
            "",
            f"## {path.parent.name}",
            "",
            "| name | used to | without it |",
            "|---|---|---|",
        ]
        for one in declared(path):
            other = "" if one.run_on == RUN_ON else f" (tested with torch {', '.join(one.run_on)})"
            lines.append(f"| `{one.name}`{other} | {one.use} | {one.without or 'error'} |")
    return "\n".join(lines) + "\n"
