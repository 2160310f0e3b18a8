"""The run folder: made once, found in many ways, never half written."""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import ExitCode, Impossible, NoSuchRun
from torchmuster.runfolder import (
    RunFolder,
    create_run_folder,
    find_run,
    list_runs,
    refuse_foreign,
    write_atomically,
)

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


def at(second: int) -> datetime:
    return NOON.replace(second=second)


def refusal(run: str, root: Path) -> tuple[str, str, str]:
    with pytest.raises(NoSuchRun) as caught:
        find_run(run, root)
    return caught.value.what, caught.value.why, caught.value.fix


def test_a_new_run_has_every_part_and_says_what_it_is(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "deep" / "runs", "Llama 7B, try #2", now=NOON)
    assert re.fullmatch(r"20260131-120000-llama-7b-try-2-[0-9a-f]{4}", run.id)
    assert {one.name for one in run.path.iterdir()} == {
        "run.json",
        "logs",
        "metrics",
        "checkpoints",
        "hang",
    }
    assert json.loads(run.marker.read_text()) == {
        "id": run.id,
        "name": "Llama 7B, try #2",
        "created": "2026-01-31T12:00:00+00:00",
        "layout": 1,
    }


def test_the_paths_of_a_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a-run")
    names = {
        run.config: "config.yaml",
        run.job: "job.json",
        run.report: "report.html",
        run.rank_log(11): "logs/rank-11.log",
        run.metrics: "metrics",
        run.checkpoints: "checkpoints",
        run.hang: "hang",
    }
    assert {str(path.relative_to(run.path)) for path in names} == set(names.values())


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("", "run"),
        ("../../etc/passwd", "etc-passwd"),
        ("Ünïcode", "n-code"),
        ("日本", "run"),
        ("x" * 300, "x" * 40),
        ("y" * 39 + " tail", "y" * 39),
    ],
)
def test_any_name_gives_a_folder_directly_below_the_root(
    name: str, slug: str, tmp_path: Path
) -> None:
    run = create_run_folder(tmp_path, name, now=NOON)
    assert run.path.parent == tmp_path
    assert run.id.startswith(f"20260131-120000-{slug}-")
    assert len(run.id) == len(f"20260131-120000-{slug}-0000")
    assert json.loads(run.marker.read_text())["name"] == name


def test_runs_made_at_the_same_moment_get_folders_of_their_own(tmp_path: Path) -> None:
    start = threading.Barrier(16)

    def make(_: int) -> list[str]:
        start.wait()
        return [create_run_folder(tmp_path, "same", now=NOON).id for _ in range(10)]

    with ThreadPoolExecutor(16) as pool:
        made = [one for ids in pool.map(make, range(16)) for one in ids]
    assert len(set(made)) == 160
    assert sorted(one.id for one in list_runs(tmp_path)) == sorted(made)


def test_a_suffix_that_is_taken_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter([b"\xaa\xaa", b"temporary 1", b"\xaa\xaa", b"\xbb\xbb", b"temporary 2"])
    monkeypatch.setattr(os, "urandom", lambda _: next(draws))
    first, second = (
        create_run_folder(tmp_path, "x", now=NOON),
        create_run_folder(tmp_path, "x", now=NOON),
    )
    assert (first.id[-4:], second.id[-4:]) == ("aaaa", "bbbb")


@pytest.mark.timeout(120)
def test_a_root_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    reasons = {
        tmp_path / "file": "File exists",
        tmp_path / "file" / "runs": "Not a directory",
        tmp_path / "gone": "File exists",
        Path("/proc/runs"): "No such file or directory",
    }
    for root, reason in reasons.items():
        with pytest.raises(Impossible) as caught:
            create_run_folder(root, "x")
        assert caught.value.what.endswith(f" {root}")
        assert caught.value.why == reason
        assert caught.value.fix
        assert caught.value.exit_code is ExitCode.IMPOSSIBLE


def test_a_folder_whose_creation_was_cut_short_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(Impossible) as caught:
        create_run_folder(tmp_path, "x")
    assert caught.value.why == "No space left on device"
    assert list_runs(tmp_path) == []


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "not-there") == []
    made = [
        create_run_folder(tmp_path, name, now=at(second))
        for second, name in [(9, "b"), (1, "c"), (5, "a")]
    ]
    (tmp_path / "some-folder").mkdir()
    (tmp_path / "some-file").write_text("")
    assert [one.id for one in list_runs(tmp_path)] == [made[i].id for i in (0, 2, 1)]


def test_within_one_second_the_later_run_is_the_newer(tmp_path: Path) -> None:
    made = [create_run_folder(tmp_path, name, now=NOON) for name in ("m", "z", "a")]
    for age, run in enumerate(made):
        os.utime(run.marker, (1000 + age, 1000 + age))
    assert [one.id for one in list_runs(tmp_path)] == [one.id for one in reversed(made)]


def test_a_run_is_found_by_folder_id_and_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    old, new = (
        create_run_folder(root, "alpha", now=at(1)),
        create_run_folder(root, "beta", now=at(2)),
    )
    assert find_run(old.id, root) == old
    assert find_run("alpha", root) == old
    assert find_run(new.id[-9:], root) == new
    assert find_run(old.path) == old
    monkeypatch.chdir(tmp_path)
    assert find_run("alpha").id == old.id
    assert find_run(f"runs/{new.id}/").id == new.id
    monkeypatch.chdir(old.path)
    assert find_run(".").id == old.id
    assert find_run(f"../{new.id}").path == new.path


def test_an_exact_id_wins_over_longer_ones(tmp_path: Path) -> None:
    short = create_run_folder(tmp_path, "x", now=NOON)
    long = RunFolder(tmp_path / f"{short.id}-copy")
    long.path.mkdir()
    long.marker.write_text("{}")
    assert find_run(short.id, tmp_path) == short


def test_a_part_that_fits_several_runs_is_refused(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    made = [create_run_folder(tmp_path, "alpha", now=at(second)) for second in range(7)]
    newest = ", ".join(one.id for one in reversed(made[2:]))
    what, why, fix = refusal("alpha", tmp_path)
    assert newest in why
    assert (what, why.replace(newest, "IDS"), fix) == snapshot


def test_a_run_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    what, why, fix = refusal("last", tmp_path)
    assert (what, why.replace(str(tmp_path), "RUNS"), fix) == snapshot
    run = create_run_folder(tmp_path, "alpha")
    what, why, fix = refusal("beta", tmp_path)
    assert why.endswith(f": {run.id}")
    assert (what, why.replace(str(tmp_path), "RUNS").replace(run.id, "ID"), fix) == snapshot


def test_a_reader_sees_the_old_file_or_the_new_one_and_nothing_between(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    contents = [letter * 200_000 for letter in "ab"]
    write_atomically(path, contents[0])
    written = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not written.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(60):
            write_atomically(path, contents[turn % 2])
    finally:
        written.set()
        reader.join()
    assert seen <= set(contents)
    assert [one.name for one in tmp_path.iterdir()] == ["some.json"]


def test_what_is_written_is_utf8(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x", "größer …\n")
    assert (tmp_path / "x").read_bytes() == "größer …\n".encode()


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["some.json"]


def test_an_interrupted_write_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "some.json", "new")
    assert list(tmp_path.iterdir()) == []


def test_text_that_cannot_be_stored_does_not_cost_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["some.json"]


def test_writing_where_there_is_no_folder_is_an_ordinary_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "no" / "some.json", "new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", "new")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_own_links_do_not_make_a_folder_foreign(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "runs", "train")
    (tmp_path / "scratch").mkdir()
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(tmp_path / "scratch")  # as on clusters with a fast disk
    (tmp_path / "short").symlink_to(run.path)
    refuse_foreign(run, "stop")
    refuse_foreign(RunFolder(tmp_path / "short"), "stop")


def test_a_part_of_another_user_makes_it_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run_folder(tmp_path, "train")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Impossible) as caught:
        refuse_foreign(run, "stop")
    assert str(run.path) in caught.value.why
