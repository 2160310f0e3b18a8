"""Read the settings file and keep the line and column of every value and mistake."""

from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster import untrusted
from torchmuster.config import fields, yaml12
from torchmuster.config.layers import Given, Layer, Strength, unknown_setting
from torchmuster.errors import Mistake
from torchmuster.units import KiB

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

_LARGEST_BYTES = 256 * KiB  # a larger file is not a settings file


def from_file(path: Path) -> Layer:
    """Read a YAML file; every value keeps its line and column."""
    try:
        content = untrusted.read_bounded(path, _LARGEST_BYTES)
        root = yaml12.compose(content.decode("utf-8-sig"))
    except OSError as error:
        what = f"cannot be read (in {Path.cwd()}): {error.strerror or error}"
        return Layer(mistakes=[Mistake(where=str(path), what=what)])
    except untrusted.Unreadable:
        why = f"larger than {_LARGEST_BYTES // KiB} KiB" if path.is_file() else "not a regular file"
        return Layer(mistakes=[Mistake(where=str(path), what=f"is not a settings file: {why}")])
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8 text: {error.reason} on line {line}"
        return Layer(mistakes=[Mistake(where=str(path), what=what, fix="save it as UTF-8")])
    except yaml12.Unreadable as error:
        return Layer(mistakes=[Mistake(where=f"{path}{error.place}", what=str(error))])
    layer = Layer()
    if root is not None and not _is_empty(root):
        _Reader(path, layer).read_mapping(root, section="")
    return layer


class _Reader:
    """Collects the values and the mistakes of one file."""

    def __init__(self, path: Path, layer: Layer) -> None:
        self._path = path
        self._layer = layer

    def read_mapping(self, node: "Node", *, section: str) -> None:
        """Read the lines of a section, or those of the whole file."""
        from ruamel.yaml.nodes import MappingNode, ScalarNode

        if not isinstance(node, MappingNode):
            what = "a settings file consists of `key: value` lines"
            if section:
                what = f"{section} is a group: write each of its settings on its own line below it"
            self._mistake(node, what)
            return
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self._mistake(key, "a key must be a plain string")
                continue
            name = key.value if key.value.isprintable() and key.value else repr(key.value)
            path = f"{section}.{name}" if section else name
            if path in lines:
                self._mistake(key, f"{path} is given twice; the first is on line {lines[path]}")
                continue
            lines[path] = key.start_mark.line + 1
            if path in fields.sections():
                if not _is_empty(value):
                    self.read_mapping(value, section=path)
            elif path in fields.leaves() and "." not in name:
                # ruamel.yaml gives an empty value the position of the next node.
                is_written = value.end_mark.index > value.start_mark.index
                self._layer.entries.append(
                    Given(
                        path=path,
                        value=yaml12.value_of(value),
                        where=self._where(value if is_written else key),
                        strength=Strength.FILE,
                    )
                )
            else:
                self._layer.mistakes.append(unknown_setting(self._where(key), path))

    def _where(self, node: "Node") -> str:
        return f"{self._path}{yaml12.place_of(node.start_mark)}"

    def _mistake(self, node: "Node", what: str) -> None:
        self._layer.mistakes.append(Mistake(where=self._where(node), what=what))


def _is_empty(node: "Node") -> bool:
    """Return whether a node is empty; an empty document and an empty section are valid."""
    return isinstance(node.value, str) and (node.tag or "").endswith(":null")
