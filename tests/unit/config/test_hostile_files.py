"""Files that are missing, broken, of something else, or made to do harm."""

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in outcome(tmp_path / "config.yaml")


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
def test_a_file_of_something_else(content: bytes, place: str, tmp_path: Path) -> None:
    assert outcome(written(tmp_path, content)).startswith(f"{place}: is not ")


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


TOO_DEEP = "is nested too deeply: more than 20 levels"
TOO_LARGE = "is too large: more than 10000 values"
TAG = "the tag !!python/"
ALIAS = "has an alias"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("distributed:\n\tnum_gpus: 1\n", ":2:1: is not YAML: "),
        ("a: b: c\n", ":1:5: is not YAML: "),
        ("distributed:\n  gpu_ids: [1\n", ":3:1: is not YAML: "),
        ("experiment_name: 'llama\nmodel:\n", ":3:1: is not YAML: "),
        ("a: 1\n---\nb: 2\n", ":2:1: is not YAML: "),
        ("%YAML 1.3\n---\n", ": is not YAML: "),
        (": \n%YAML 2.0  ", ": is not YAML: "),
        ('a: "\\UFFFFFFFF"', ": is not YAML: "),
        ('a: "\\U00110000"', ": is not YAML: "),
        ("x: *nope\n", f":1:4: {ALIAS}"),
        ("distributed:\n  gpu_ids: &g [0, *g]\n", f":2:19: {ALIAS}"),
        ("distributed: &d\n  num_gpus: *d\n", f":2:13: {ALIAS}"),
        ('zzz: !!python/object/apply:os.system ["touch x"]', f":1:6: {TAG}"),
        ("distributed: !!python/object/new:os.system [touch x]", f":1:14: {TAG}"),
        ("experiment_name: !!python/name:os.system ''", f":1:18: {TAG}"),
        ("distributed: {gpu_ids: [0, !!python/module:os '']}", f":1:28: {TAG}"),
        ("[" * 20_000, f":1:21: {TOO_DEEP}"),
        ("{a: " * 20_000, f":1:81: {TOO_DEEP}"),
        (f"experiment_name: {'[' * 200}{']' * 200}", f":1:37: {TOO_DEEP}"),
        (f"distributed: {{gpu_ids: [{'0, ' * 12_000}]}}", TOO_LARGE),
        (f"distributed: {{num_gpus: {'9' * 5000}}}", ":1:25: distributed.num_gpus: "),
        ('experiment_name: "a\\uD800b"', ":1:18: experiment_name: "),
    ],
    ids=lambda text: text[:20],
)
def test_each_gives_one_message_with_its_place(
    text: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mistake in outcome(written(tmp_path, text))
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "# only a comment\n", "---\n", "--- ~\n...\n", "distributed:\nmodel:\n", "{}"],
)
def test_an_empty_file_or_section_gives_the_defaults(text: str, tmp_path: Path) -> None:
    assert resolve_settings(file=written(tmp_path, text)) == resolve_settings()


@pytest.mark.parametrize(("start", "end"), [("", "\r\n"), ("\ufeff", "\r")])
def test_files_from_other_systems_are_read(start: str, end: str, tmp_path: Path) -> None:
    text = start + end.join(["experiment_name: größer", "distributed:", "  num_gpus: 0", ""])
    assert outcome(written(tmp_path, text)).startswith(":3:13: distributed.num_gpus: ")


def test_a_variable_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ConfigError):
        resolve_settings(environment={"TORCHMUSTER_EXPERIMENT_NAME": os.fsdecode(b"caf\xe9")})


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
