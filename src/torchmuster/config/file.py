"""Read the settings file and keep the line and column of every value and mistake."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchmuster import untrusted
from torchmuster.config import fields, yaml12
from torchmuster.config.hugging_face_names import our_setting
from torchmuster.config.layers import Layer, SettingValue, Source, Strength
from torchmuster.errors import Mistake
from torchmuster.units import KiB

if TYPE_CHECKING:
    from ruamel.yaml.nodes import Node

_LARGEST_BYTES = 256 * KiB  # a larger file is not a settings file


def from_file(path: Path) -> Layer:
    """Read a YAML file; every value keeps its line and column."""
    try:
        content = untrusted.read_bounded(path, _LARGEST_BYTES)
    except FileNotFoundError:
        where = "" if path.is_absolute() else f" (in {Path.cwd()})"
        return _broken(str(path), f"no such file{where}", _nearest_file(path))
    except OSError as error:
        return _broken(str(path), f"cannot be read: {error.strerror or error}")
    except untrusted.Unreadable:
        large = path.is_file()
        why = f"larger than {_LARGEST_BYTES // KiB} KiB" if large else "not a regular file"
        return _broken(str(path), f"is not a settings file: {why}")
    try:
        root = yaml12.compose(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8 text: byte 0x{content[error.start]:02x} on line {line}"
        return _broken(str(path), what, "save it as UTF-8")
    except yaml12.Unreadable as error:
        fix = "indent with spaces, not tabs" if r"'\t'" in str(error) else ""
        return _broken(f"{path}{error.place}", str(error), fix)
    layer = Layer()
    if root is not None and not _is_empty(root):
        _Reader(path, layer).read_mapping(root, root, prefix="")
    return layer


class _Reader:
    """Collects entries and mistakes from the nodes of one file."""

    def __init__(self, path: Path, layer: Layer) -> None:
        self._path = path
        self._layer = layer

    def read_mapping(self, key: "Node", node: "Node", prefix: str) -> None:
        from ruamel.yaml.nodes import MappingNode, ScalarNode

        if not isinstance(node, MappingNode):
            section = f"{prefix} is a group: write each of its settings on its own line below it"
            self._mistake(
                _node_written(key, node),
                section if prefix else "a settings file consists of `key: value` lines",
            )
            return
        seen: dict[str, Node] = {}
        scalars = {
            name.value: value.value
            for name, value in node.value
            if isinstance(name, ScalarNode) and isinstance(value, ScalarNode)
        }
        for name, value in node.value:
            if not isinstance(name, ScalarNode):
                self._mistake(name, "a key must be a plain string")
            elif name.value in seen:
                first = seen[name.value].start_mark.line + 1
                what = f"{_path(prefix, name.value)} is given twice"
                self._mistake(name, what, f"the first is on line {first}")
            else:
                seen[name.value] = name
                self._read_setting(prefix, name, value, scalars)

    def _read_setting(
        self, prefix: str, key: "Node", value: "Node", scalars: Mapping[str, str]
    ) -> None:
        path = _path(prefix, key.value)
        if "." in key.value and path in fields.leaves():
            section, _, last = path.rpartition(".")
            fix = f"write {last} on its own line below {section}:"
            self._mistake(key, f"{path} is a key that contains a dot", fix)
        elif path in fields.sections():
            if not _is_empty(value):
                self.read_mapping(key, value, path)
        elif path in fields.leaves():
            self._layer.entries.append(
                SettingValue(
                    path=path,
                    value=yaml12.value_of(value),
                    source=Source(
                        strength=Strength.FILE, where=self._where(_node_written(key, value))
                    ),
                    items=self._items(value),
                )
            )
        else:
            known = [*fields.leaves(), *fields.sections()]
            fix = our_setting(path, scalars) or fields.suggest_name(path, known)
            self._mistake(key, f"{path} is not a setting", fix)

    def _items(self, node: "Node") -> tuple[str, ...]:
        from ruamel.yaml.nodes import SequenceNode

        return tuple(map(self._where, node.value)) if isinstance(node, SequenceNode) else ()

    def _where(self, node: "Node") -> str:
        return f"{self._path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def _mistake(self, node: "Node", what: str, fix: str = "") -> None:
        self._layer.mistakes.append(Mistake(where=self._where(node), what=what, fix=fix))


def _path(prefix: str, name: str) -> str:
    shown = name if name.isprintable() and name else repr(name)
    return f"{prefix}.{shown}" if prefix else shown


def _is_empty(node: "Node") -> bool:
    """Return whether a node is empty; an empty document and an empty section are valid."""
    return isinstance(node.value, str) and (node.tag or "").endswith(":null")


def _node_written(key: "Node", value: "Node") -> "Node":
    """Return the node whose position is reported.

    ruamel.yaml gives an alias the position of its anchor, and an empty value the position of the
    next node; for both, the key's position is reported.
    """
    begin, end = value.start_mark.index, value.end_mark.index
    return key if begin < key.start_mark.index or begin == end else value


def _broken(where: str, what: str, fix: str = "") -> Layer:
    return Layer(mistakes=[Mistake(where=where, what=what, fix=fix)])


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    # Compare stems: a common .yaml suffix does not make two names similar.
    alike = difflib.get_close_matches(path.stem, {Path(name).stem for name in names})
    candidates = [name for name in names if Path(name).stem in alike]
    nearest = difflib.get_close_matches(path.name, candidates, n=1)
    return f"did you mean {path.with_name(nearest[0])}?" if nearest else ""
