"""Only new lines are read; a file that was written anew is read from its beginning."""

from pathlib import Path

from torchmuster.monitor.collecting.growing_file import GrowingFile
from torchmuster.runfolder import write_atomically


def test_each_look_gives_what_came_since(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = GrowingFile(path)
    assert file.new_lines() == (False, [])
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert file.new_lines() == (True, [{"step": 1}, {"step": 2}])
    assert file.new_lines() == (False, [])
    with path.open("a") as stream:
        stream.write('{"step": 3}\n{"st')
    assert file.new_lines() == (False, [{"step": 3}])
    with path.open("a") as stream:
        stream.write('ep": 4}\nnonsense\n[1]\n')
    assert file.new_lines() == (False, [{"step": 4}])


def test_a_file_that_was_cut_or_replaced_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    file = GrowingFile(path)
    file.new_lines()
    write_atomically(path, '{"step": 1}\n')
    assert file.new_lines() == (True, [{"step": 1}])
    with path.open("w") as stream:
        stream.write("{}\n")
    assert file.new_lines() == (True, [{}])
