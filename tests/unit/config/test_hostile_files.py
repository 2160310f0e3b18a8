"""Files that are missing, broken, of something else, or made to do harm."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from torchmuster.config.layers import Flag
from torchmuster.config.resolve import resolve_settings
from torchmuster.errors import ConfigError


def outcome(path: Path) -> str:
    """Return the one mistake of a file, its name left out."""
    with pytest.raises(ConfigError) as caught:
        resolve_settings(file=path)
    (mistake,) = caught.value.mistakes
    assert mistake.where.startswith(str(path))
    place = mistake.where.removeprefix(str(path))
    return f"{place}: {mistake.what}" + (f"; {mistake.fix}" if mistake.fix else "")


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "c.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_missing_file_is_an_error_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.yaml", "a.yaml", "config.json"):
        written(tmp_path, "").rename(tmp_path / name)
    nearest = f"did you mean {tmp_path}/config.yaml?"
    assert outcome(tmp_path / "confg.yaml") == f": no such file; {nearest}"
    assert outcome(tmp_path / "config.yml") == f": no such file; {nearest}"
    assert outcome(tmp_path / "zzzzz.yaml") == ": no such file"
    assert outcome(tmp_path / "no" / "folder.yaml") == ": no such file"
    monkeypatch.chdir(tmp_path)
    found = outcome(Path("confg.yaml"))
    assert found == f": no such file (in {tmp_path}); did you mean config.yaml?"


@pytest.mark.parametrize(
    ("content", "place"),
    [
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\x00", "", id="picture"),
        pytest.param(b"a: 1\nb: caf\xe9\n", "", id="latin-1"),
        pytest.param("a: 1\n".encode("utf-16"), "", id="utf-16"),
        pytest.param(b"PK\x03\x04", ":1:3", id="zip"),
        pytest.param(b"a: 1\nb: \x00\n", ":2:4", id="zero"),
        pytest.param(b"x" * 300_000, "", id="large"),
    ],
)
def test_a_file_of_something_else(
    content: bytes, place: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    found = outcome(written(tmp_path, content))
    assert found.startswith(f"{place}: ")
    assert found == snapshot


def test_a_device_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        assert outcome(path).endswith(": not a regular file")


def test_the_callers_own_pipe_is_read() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"experiment_name: piped\n")
        os.close(writing)
        settings = resolve_settings(file=Path(f"/dev/fd/{reading}")).settings
    finally:
        os.close(reading)
    assert settings.experiment_name == "piped"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        pytest.param("distributed:\n\tnum_gpus: 1\n", ":2:1", id="tab"),
        pytest.param("a: b: c\n", ":1:5", id="two values"),
        pytest.param("distributed:\n  gpu_ids: [1\n", ":3:1", id="open list"),
        pytest.param("experiment_name: 'llama\nmodel:\n", ":3:1", id="open quote"),
        pytest.param("x: *nope\n", ":1:4", id="alias"),
        pytest.param("a: 1\n---\nb: 2\n", ":2:1", id="two documents"),
        pytest.param("%YAML 1.3\n---\n", "", id="YAML 1.3"),
        pytest.param(": \n%YAML 2.0  ", "", id="YAML 2.0"),
        pytest.param('a: "\\UFFFFFFFF"', "", id="no character"),
        pytest.param('a: "\\U00110000"', "", id="past Unicode"),
    ],
)
def test_what_is_not_yaml_is_reported_at_its_place(
    text: str, place: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    found = outcome(written(tmp_path, text))
    assert found.startswith(f"{place}: ")
    assert found == snapshot


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "# only a comment\n", "---\n", "--- ~\n...\n", "distributed:\nmodel:\n", "{}"],
)
def test_an_empty_file_or_section_gives_the_defaults(text: str, tmp_path: Path) -> None:
    assert resolve_settings(file=written(tmp_path, text)) == resolve_settings()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_files_from_other_systems_are_read(start: str, end: str, tmp_path: Path) -> None:
    text = start + end.join(["experiment_name: größer", "distributed:", "  num_gpus: 0", ""])
    assert outcome(written(tmp_path, text)).startswith(":3:13: distributed.num_gpus must be")
    text = start + end.join(["experiment_name: 3", ""])
    assert outcome(written(tmp_path, text)).startswith(":1:18: experiment_name must be")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ('!!python/object/apply:os.system ["touch x"]', "apply:os.system"),
        ("!!python/object/new:os.system [touch x]", "new:os.system"),
        ("!!python/name:os.system ''", "name:os.system"),
        ("!!python/module:os ''", "module:os"),
        ("[0, !!python/object/apply:os.system [touch x]]", "apply:os.system"),
    ],
)
@pytest.mark.parametrize("key", ["experiment_name", "distributed: {gpu_ids", "distributed", "zzz"])
def test_tags_of_a_program_run_nothing(
    key: str, value: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = outcome(written(tmp_path, f"{key}: {value}" + ("}" if "{" in key else "")))
    assert found.split(": ", 1)[1].startswith("the tag !!python/")
    assert found.endswith(f"{place} has no meaning here")
    assert [one.name for one in tmp_path.iterdir()] == ["c.yaml"]


def test_a_number_that_is_none_is_a_text(tmp_path: Path) -> None:
    for value, shown in [
        ("!!int abc", "abc"),
        ("!!float abc", "abc"),
        ("9" * 5000, "9" * 59 + "…"),
    ]:
        found = outcome(written(tmp_path, f"distributed: {{num_gpus: {value}}}"))
        assert found.startswith(":1:25: distributed.num_gpus ")
        assert found.endswith(f" '{shown}'")
    found = outcome(written(tmp_path, "distributed: {enabled: !!bool abc}"))
    assert found.startswith(":1:24: distributed.enabled ")
    assert found.endswith(" 'abc'")


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    found = outcome(written(tmp_path, 'experiment_name: "a\\uD800b"'))
    assert found.startswith(":1:18: experiment_name ")
    assert found.endswith(r" 'a\ud800b'")
    with pytest.raises(ConfigError):
        resolve_settings(environment={"TORCHMUSTER_EXPERIMENT_NAME": os.fsdecode(b"caf\xe9")})


TOO_DEEP = " 20 levels"
TOO_LARGE = " 10000 values"
BOMB = "- &l0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    - &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]\n" for n in range(12)
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("distributed:\n  gpu_ids: &g [0, *g]\n", TOO_DEEP),
        ("distributed: &d\n  num_gpus: *d\n", TOO_DEEP),
        ("&r {model: {device_map: *r}}", TOO_DEEP),
        (f"distributed:\n  gpu_ids:\n    {BOMB}", TOO_LARGE),
        (f"zzz:\n    {BOMB}", TOO_LARGE),
        ("[" * 20_000, TOO_DEEP),
        ("{a: " * 20_000, TOO_DEEP),
        (f"experiment_name: {'[' * 200}{']' * 200}", TOO_DEEP),
        (f"distributed: {{gpu_ids: [{'0, ' * 12_000}]}}", TOO_LARGE),
    ],
    ids=lambda text: text[:20],
)
def test_what_would_be_endless_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    assert problem in outcome(written(tmp_path, text))


PIECES = [
    *"ab01:-?,[]{}#&*!|>'\"%@`\\ \n\t.~<=_+e",
    "\n  ",
    "\n- ",
    ": ",
    "---\n",
    "&a ",
    "*a",
    "<<: ",
]
PIECES += ["%YAML 1.", "%TAG ! x", "!!int ", "!!bool ", "!!x", "\\u", "\ud7ff", "\ufeff", "\u2028"]
PIECES += [
    "distributed: ",
    "distributed:\n  num_gpus: ",
    "gpu_ids: ",
    "model: ",
    "experiment_name: ",
]


def mistakes(file: Path | None = None, text: str = "") -> int:
    """Resolve and count the mistakes; only a ConfigError is an answer."""
    names = ("TORCHMUSTER_DISTRIBUTED_NUM_GPUS", "TORCHMUSTER_DISTRIBUTED_GPU_IDS")
    flags = [Flag(flag="--set", path=text, text=text)]
    try:
        if file:
            resolve_settings(file=file)
        else:
            resolve_settings(environment=dict.fromkeys(names, text), flags=flags)
    except ConfigError as error:
        return len(error.mistakes) or -1
    return 0


@pytest.fixture(scope="module")
def garbage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("garbage") / "c.yaml"


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
@example(text="distributed: {num_gpus: +_, gpu_ids: [!!int , !!float '']}")
@example(text='"\\U00110000')
def test_random_text_is_read_or_refused(text: str, garbage: Path) -> None:
    garbage.write_text(text, encoding="utf-8")
    assert mistakes(garbage) >= 0
    assert mistakes(text=text) >= 1  # its flag names no setting
