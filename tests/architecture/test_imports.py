"""What importing the package and its command line costs; import-linter checks the layers (pyproject.toml)."""

import subprocess
import sys

CLI = """
import importlib, pkgutil, sys
import torchmuster.cli
for module in pkgutil.walk_packages(torchmuster.cli.__path__, "torchmuster.cli."):
    if not module.name.endswith("torchrun_parser"):  # a process of its own
        importlib.import_module(module.name)
from torchmuster.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0, end.code
imported = {"torch", "numpy", "pandas", "transformers"} & set(sys.modules)
assert not imported, imported
"""
PACKAGE = """
import os, signal, sys, threading
before = dict(os.environ), signal.getsignal(signal.SIGINT)
import torchmuster.distributed, torchmuster.cli.main
assert before == (dict(os.environ), signal.getsignal(signal.SIGINT))
assert threading.active_count() == 1
assert not {"torch", "rich", "ruamel"} & set(sys.modules)
"""


def test_no_module_of_the_command_line_imports_torch() -> None:
    subprocess.run([sys.executable, "-c", CLI], check=True, stdout=subprocess.DEVNULL)


def test_importing_the_package_changes_nothing() -> None:
    subprocess.run([sys.executable, "-c", PACKAGE], check=True)
