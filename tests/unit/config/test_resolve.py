"""What a settings file means: YAML 1.2's values, whatever valid settings are written."""

import io
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from ruamel.yaml import YAML

from torchmuster.config import fields, yaml12
from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings

Document = dict[str, object]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1e5", 1e5),
        ("2E-4", 2e-4),
        ("1.5", 1.5),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("2026-01-01", "2026-01-01"),
        ("2026-01-01 10:00:00", "2026-01-01 10:00:00"),
        ("12:30:45", "12:30:45"),
        ("0:1", "0:1"),
        ("=", "="),
        ("<<", "<<"),
        ("'1e-5'", "1e-5"),
        ("[0:1, 1, a]", ["0:1", 1, "a"]),
        ("{a: 1, b: [no]}", {"a": 1, "b": ["no"]}),
        ("", ""),
        ("  ", "  "),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    parsed = yaml12.parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_source_of_each_value_is_its_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed:\n  strategy:   'ddp'\n  gpu_ids:\n    - 1\nexperiment_name: a\n")
    sources = {
        name: source.where
        for name, source in resolve_settings(file=path).sources.items()
        if source.where != "default"
    }
    assert sources == {
        "experiment_name": f"{path}:5:18",
        "distributed.strategy": f"{path}:2:15",
        "distributed.gpu_ids": f"{path}:4:5",
    }


def values_of(info: inspect.Type) -> st.SearchStrategy[object]:
    """Return the valid values of a type, as they would stand in a file."""
    match info:
        case inspect.Metadata(type=inner):
            return values_of(inner)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values_of, types))
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high if high is not None else 10**6)
        case inspect.FloatType(gt=above, lt=below, le=high):
            most = 1e6 if below is None and high is None else 0.999
            finite = st.floats(0, most, allow_nan=False, exclude_min=above is not None)
            # A number that has no exponent's sign is read back by YAML as it was written.
            return finite.map(lambda number: float(f"{number:.6f}") or 0.5)
        case inspect.StrType(min_length=length):
            tricky = st.sampled_from(
                ["no", "1e-5", "0:1", "null", "~", "2026-01-01", "- a", "a: b"]
            )
            # ruamel.yaml writes YAML 1.1's other line breaks in a way that it does not read back,
            letters = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
            texts = st.text(letters, min_size=length or 0, max_size=12)
            # nor what begins with a question mark, in braces
            return texts.filter(lambda text: not text.startswith("?")) | tricky
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.VarTupleType(item_type=item, min_length=length, max_length=most):
            return st.lists(values_of(item), min_size=length or 0, max_size=most or 5)
        case inspect.DictType():
            return st.dictionaries(st.sampled_from(["a", "b", "r"]), st.sampled_from(["x", "y"]))
    raise AssertionError(f"no values for {info}")


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Draw the content of a valid file: any settings, in any order, some left out."""
    paths = draw(st.permutations(list(fields.leaves())))
    document: Document = {}
    for path in paths[: draw(st.integers(0, len(paths)))]:
        value = draw(values_of(inspect.type_info(fields.leaves()[path].type)))
        section, _, name = path.rpartition(".")
        group = document.setdefault(section, {}) if section else document
        assert isinstance(group, dict)
        group[name] = value
    distributed = document.get("distributed")
    if isinstance(distributed, dict) and distributed.get("gpu_ids") and distributed.get("num_gpus"):
        distributed["num_gpus"] = len(distributed["gpu_ids"])
    return document


def flat(document: Document) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            found[name] = value
    return {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "c.yaml"


@settings(max_examples=100, deadline=None)
@given(document=documents(), flow=st.booleans())
def test_valid_settings_come_back_as_they_were_written(
    document: Document, flow: bool, file: Path
) -> None:
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = flow
    writer.width = 10_000  # ruamel.yaml's folding of long lines loses blanks after escapes
    stream = io.StringIO()
    writer.dump(document, stream)
    file.write_text(stream.getvalue(), encoding="utf-8")
    result = resolve_settings(file=file)
    defaults = {path: leaf.default for path, leaf in fields.leaves().items()}
    assert result.values() == defaults | flat(document)
    given_here = {path for path, source in result.sources.items() if source.where != "default"}
    assert given_here == set(flat(document))


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1))
@example("run #3: 'x' [y")
def test_any_text_can_be_given_as_a_flag(text: str) -> None:
    result = resolve_settings(flags=[Flag(flag="--set", path="experiment_name", text=text)])
    assert result.settings.experiment_name == text


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.integers(0, 99)
        | st.from_regex(r"[0-9]:[0-9]|(GPU|MIG)-[0-9a-f-]{1,12}", fullmatch=True),
        min_size=1,
    )
)
def test_any_gpu_ids_can_be_given_as_a_variable(ids: list[int | str]) -> None:
    for text in (",".join(map(str, ids)), f"[{', '.join(map(str, ids))}]"):
        result = resolve_settings(environment={"TORCHMUSTER_DISTRIBUTED_GPU_IDS": text})
        assert result.settings.distributed.gpu_ids == tuple(ids)
