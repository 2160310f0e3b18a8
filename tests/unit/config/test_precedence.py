"""A flag wins over the environment, that over the file, that over the default: for every setting."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import inspect

from torchmuster.config import fields
from torchmuster.config.layers import Flag, from_environment, variable_name
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError


def samples(path: str) -> tuple[tuple[str, object], tuple[str, object]]:
    """Return two valid values of a setting, neither its default if it has more: text and value."""
    info = inspect.type_info(fields.leaves()[path].type)
    while isinstance(info, inspect.Metadata | inspect.UnionType):
        info = info.type if isinstance(info, inspect.Metadata) else info.types[0]
    match info:
        case inspect.BoolType():
            return ("true", True), ("false", False)
        case inspect.IntType(ge=low):
            first = 3 + (low or 0)
            return (str(first), first), (str(first + 1), first + 1)
        case inspect.StrType():
            return ("first", "first"), ("second", "second")
        case inspect.DictType():
            return ("{first: a}", {"first": "a"}), ("{second: b}", {"second": "b"})
        case inspect.FloatType():
            return ("1e-5", 1e-5), ("0.5", 0.5)
        case inspect.LiteralType(values=values):
            default = fields.leaves()[path].default
            one, other, *_ = sorted(map(str, values), key=lambda value: value == default)
            return (one, one), (other, other)
        case inspect.VarTupleType(item_type=inspect.StrType()):
            return ("[a, b:4]", ("a", "b:4")), ("[c]", ("c",))
        case inspect.VarTupleType(item_type=inspect.LiteralType(values=(one, other, *_))):
            return (f"[{one}]", (one,)), (f"[{other}, {one}]", (other, one))
        case inspect.VarTupleType(item_type=inspect.FloatType()):
            return ("[0.5, 0.25]", (0.5, 0.25)), ("[0.75, 0.125]", (0.75, 0.125))
        case inspect.VarTupleType():
            return ("[4, 2]", (4, 2)), ("[1, 3]", (1, 3))
    raise AssertionError(f"no samples for {path}: {info}")


def yaml(path: str, text: str) -> str:
    section, _, name = path.rpartition(".")
    return f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n"


def written_at(path: str) -> str:
    section, _, name = path.rpartition(".")
    return f"2:{len(name) + 5}" if section else f"1:{len(name) + 3}"


def resolved(
    folder: Path, path: str, *, file: str = "", environment: str = "", flag: str = ""
) -> tuple[object, str]:
    """Resolve one setting that is written in some of the places; return its value and source."""
    given = None
    if file:
        given = folder / "c.yaml"
        given.write_text(yaml(path, file))
    variables = {"PATH": "/bin"} | ({variable_name(path): environment} if environment else {})
    flags = [Flag(flag="--some-flag", path=path, text=flag)] if flag else []
    result = resolve_settings(file=given, environment=variables, flags=flags)
    return result.values()[path], result.sources[path].where


def test_the_default_counts_where_nothing_is_written() -> None:
    result = resolve_settings()
    for path, leaf in fields.leaves().items():
        assert (result.values()[path], result.sources[path].where) == (leaf.default, "default")


@pytest.mark.parametrize("path", fields.leaves())
def test_the_strongest_place_counts(path: str, tmp_path: Path) -> None:
    (weak, weak_value), (strong, strong_value) = samples(path)
    assert weak_value != strong_value
    in_file, in_variable = f"{tmp_path}/c.yaml:{written_at(path)}", f"${variable_name(path)}"

    assert resolved(tmp_path, path, file=strong) == (strong_value, in_file)
    over_file = resolved(tmp_path, path, file=weak, environment=strong)
    assert over_file == (strong_value, in_variable)
    over_both = resolved(tmp_path, path, file=weak, environment=weak, flag=strong)
    assert over_both == (strong_value, "--some-flag")


def test_the_last_of_several_equal_flags_counts() -> None:
    flags = [Flag(flag=f"--set {n}", path="distributed.num_gpus", text=str(n)) for n in (2, 4)]
    result = resolve_settings(flags=flags)
    assert result.settings.distributed.num_gpus == 4
    assert result.sources["distributed.num_gpus"].where == "--set 4"


@pytest.mark.parametrize(
    ("file", "environment", "flags", "agreed"),
    [
        # each source: the lines of the file, the variables and the flags; then num_gpus and gpu_ids
        ("num_gpus: 4, gpu_ids: [4, 5, 6, 7]", {}, {}, (4, (4, 5, 6, 7))),
        ("num_gpus: 2", {}, {"gpu_ids": "4,5,6"}, (3, (4, 5, 6))),
        ("gpu_ids: [4, 5, 6]", {"num_gpus": "2"}, {}, (2, (4, 5, 6))),
        ("num_gpus: 2, gpu_ids: [4, 5, 6]", {}, {}, None),
        ("gpu_ids: [4, 5, 6]", {"num_gpus": "4"}, {}, None),
        ("", {}, {"num_gpus": "2", "gpu_ids": "4,5,6"}, None),
    ],
)
def test_num_gpus_and_gpu_ids_are_made_to_agree(
    file: str,
    environment: dict[str, str],
    flags: dict[str, str],
    agreed: tuple[int, tuple[int, ...]] | None,
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed: {{{file}}}")
    variables = {variable_name(f"distributed.{name}"): text for name, text in environment.items()}
    given = [
        Flag(flag=f"--{name}", path=f"distributed.{name}", text=text)
        for name, text in flags.items()
    ]
    if agreed is None:
        with pytest.raises(ConfigError, match="but gpu_ids lists 3"):
            resolve_settings(file=path, environment=variables, flags=given)
        return
    found = resolve_settings(file=path, environment=variables, flags=given)
    chosen = found.settings.distributed
    assert (chosen.num_gpus, chosen.gpu_ids) == agreed


def from_variable(text: str) -> object:
    environment: Mapping[str, str] = {"TORCHMUSTER_DISTRIBUTED_GPU_IDS": text}
    return resolve_settings(environment=environment).settings.distributed.gpu_ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0,2", (0, 2)),
        ("[0, 2]", (0, 2)),
        (" [0,2]", (0, 2)),
        ("3", (3,)),
        ("0:1", ("0:1",)),
        ("0:1,1:0", ("0:1", "1:0")),
        ("GPU-0515791b-9f8f-58f5-98b5-48e51d0d99d9", ("GPU-0515791b-9f8f-58f5-98b5-48e51d0d99d9",)),
        (
            "GPU-05,MIG-55562eac-e5a4-5be4-8c1d-798d803cb4f6",
            ("GPU-05", "MIG-55562eac-e5a4-5be4-8c1d-798d803cb4f6"),
        ),
        ("MIG-GPU-0515791b/1/0,0", ("MIG-GPU-0515791b/1/0", 0)),
        ("'0'", ("0",)),
    ],
)
def test_gpu_ids_from_the_environment(text: str, ids: tuple[int | str, ...]) -> None:
    given = from_variable(text)
    assert given == ids
    assert [type(one) for one in ids] == [type(one) for one in given]


@pytest.mark.parametrize(
    "text", ["run #3", "a: b", "[x]", "123", "no", "'x'", "~", " x ", "*a", "-"]
)
def test_a_text_from_the_environment_or_a_flag_is_taken_as_it_is(text: str) -> None:
    by_variable = resolve_settings(environment={"TORCHMUSTER_EXPERIMENT_NAME": text})
    by_flag = resolve_settings(flags=[Flag(flag="--set", path="experiment_name", text=text)])
    assert by_variable.settings.experiment_name == by_flag.settings.experiment_name == text


def test_null_unsets_what_the_file_has_set(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed: {num_gpus: 2}\nmodel: {model_name_or_path: a/b}\n")
    unset = ["distributed.num_gpus", "model.model_name_or_path"]
    result = resolve_settings(
        file=path, flags=[Flag(flag="--set", path=one, text="null") for one in unset]
    )
    assert [result.values()[one] for one in unset] == [None, None]


def test_variables_of_other_programs_and_of_claims_are_left_alone() -> None:
    layer = from_environment(
        {"TORCHMUSTER_CLAIMS_DIR": "/x", "TORCH_HOME": "/y", "MUSTER_X": "1", "torchmuster_x": "1"}
    )
    assert layer.entries == []
    assert layer.mistakes == []


@pytest.mark.parametrize(
    ("variable", "fix"),
    [
        ("TORCHMUSTER_DISTRIBUTED_NUM_GPU", "did you mean distributed.num_gpus?"),
        ("TORCHMUSTER_TRAIN_LR", "use train.learning_rate"),
        ("TORCHMUSTER_DISTRIBUTED_ZZZ", ""),
    ],
)
def test_an_unknown_variable_of_a_section_is_refused_with_the_nearest(
    variable: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(environment={variable: "1"})
    (mistake,) = caught.value.mistakes
    assert (mistake.where, mistake.fix) == (f"${variable}", fix)


def test_no_variable_that_the_program_reads_is_taken_for_a_setting() -> None:
    source = Path(fields.__file__).parents[1]
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    variables = set(re.findall(r"\bTORCHMUSTER_[A-Z_]*[A-Z]\b", text))
    assert from_environment(dict.fromkeys(variables, "1")).mistakes == []
