"""From what torch says to a run that works, by doing what ``muster`` says and nothing else."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hosts.checking import do_what_it_says, names
from hosts.conftest import MakeLab
from hosts.faults import injected
from hosts.host import Host, HostProcess
from hosts.lab import Lab
from hosts.launching import strays
from hosts.namespaces import await_true
from hosts.trouble import SCRIPTS, TROUBLES, Trouble

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"

Found = dict[str, str]


@pytest.mark.nightly
@pytest.mark.parametrize("trouble", TROUBLES, ids=[one.name for one in TROUBLES])
def test_what_muster_says_leads_to_a_run_that_works(trouble: Trouble, make_lab: MakeLab) -> None:
    lab = make_lab(trouble.hosts)
    work = lab.folder / "work"
    work.mkdir()
    for name, text in SCRIPTS.items():
        (work / name).write_text(text)
    with ExitStack() as faults:
        faults.enter_context(injected(lab, *trouble.faults))
        said = _said_without_muster(lab, trouble, work)
        explanation = _explained(lab.hosts[0], said, work)
        assert explanation["name"] == trouble.cause, f"{explanation}\n{said}"
        line = _line(explanation["fix"], trouble.next_line)
        if line.startswith("muster run "):  # which settles it by itself
            proof, proven = _filled_in(line, lab), "{host}: {count} ranks, sum {count}"
        else:
            _mended(lab, trouble, explanation, work, by_hand=faults.close)
            everyone = ",".join(one.name for one in lab.hosts)
            proof = f"muster check --device cpu --hosts {everyone}"
            proven = "world_size={count} device=cpu hostname={host}"
        told = _typed(lab.hosts[0], proof, work)
        for one in lab.hosts:
            assert proven.format(host=one.name, count=trouble.hosts) in told
    await_true("nothing is left", lambda: strays(lab) == {})


def test_the_page_for_people_in_trouble_has_every_story() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for one in TROUBLES:
        told = [row for row in rows if f"`{one.cause}`" in row and one.next_line in row]
        assert any(f"`{one.finding}`" in row or not one.finding for row in told), one.name


# ---- what torch says


def _said_without_muster(lab: Lab, trouble: Trouble, work: Path) -> str:
    """Return what the first host that gives up says; the others, which would wait on, are ended."""
    if trouble.quoted:
        return trouble.quoted
    files = {name: work / f"said-by-{name}" for name in trouble.bare}
    started = {
        name: _started(lab.host(name), argv, work, files[name])
        for name, argv in trouble.bare.items()
    }
    given_up: list[str] = []

    def has_given_up() -> bool:
        given_up.extend(name for name, process in started.items() if process.poll())
        return bool(given_up)

    await_true("torch gives up", has_given_up)
    for process in started.values():
        _ended(process)
    return files[given_up[0]].read_text()


def _started(host: Host, argv: Sequence[str], work: Path, said: Path) -> HostProcess:
    with said.open("w") as file:
        return host.popen(argv, cwd=work, stdout=file, stderr=file)


def _ended(process: HostProcess) -> None:
    """End a torchrun and its ranks, which would outlive it."""
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(process.command_pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()


# ---- what muster says


def _explained(host: Host, said: str, work: Path) -> Found:
    told = host.run(["muster", "doctor", "--json", "--explain", "-"], input=said, cwd=work)
    assert told.returncode == 0, told.stderr
    return _findings(told.stdout)[0]


def _findings(told: str) -> list[Found]:
    document: dict[str, Any] = json.loads(told)
    findings: list[Found] = document["findings"]
    return findings


def _line(fix: str, beginning: str) -> str:
    """Return the line of a fix that begins so, as it stands and without what is said beside it."""
    lines = [one.strip() for one in fix.splitlines()]
    found = [one.partition("   #")[0] for one in lines if one.startswith(beginning)]
    assert len(found) == 1, f"{beginning!r} begins {len(found)} lines of:\n{fix}"
    return found[0]


def _filled_in(line: str, lab: Lab) -> str:
    """Put the hosts in for the words in capitals."""
    everyone = [one.name for one in lab.hosts]
    others = [
        one.name for one in lab.hosts if not re.search(rf"\b({one.name}|{one.address})\b", line)
    ]
    filled = line.replace("A,B", ",".join(everyone)).replace("OTHER", ",".join(others))
    assert not re.search(r"\b[A-Z]{2,}\b", filled), filled
    return filled


def _typed(host: Host, line: str, work: Path) -> str:
    """Run a line as it stands, which must go well, and return what it prints."""
    done = host.run(["sh", "-c", line], cwd=work, env={"NO_COLOR": "1"})
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def _found(host: Host, line: str, trouble: Trouble, work: Path) -> Found | None:
    """Return what an examination, typed as it stands, finds of this trouble."""
    quick = f"{line} --quick" if line.startswith("muster check") else line
    told = host.run(["sh", "-c", f"{quick} --json"], cwd=work)
    found = [one for one in _findings(told.stdout) if one["name"] == trouble.finding]
    assert all(names(one, trouble.says) for one in found), f"{list(trouble.says)}\n{found}"
    return next(iter(found), None)


# ---- doing it


def _mended(
    lab: Lab, trouble: Trouble, explanation: Found, work: Path, by_hand: Callable[[], None]
) -> None:
    """Do what the explanation says, or what is found by the command that it names."""
    host = lab.host(trouble.typed_on)
    line = _line(explanation["fix"], trouble.next_line)
    if not line.startswith("muster "):
        do_what_it_says(host, explanation["fix"], trouble.next_line)
        assert "a batch of 8" in _typed(host, "python load.py", work)
        return
    examination = _filled_in(line, lab)
    finding = _found(host, examination, trouble, work)
    assert finding is not None, f"{trouble.finding} is not found"
    if trouble.mended_by:
        _done_where_it_says(lab, host, finding, trouble.mended_by)
        assert _found(host, examination, trouble, work) is None
    elif finding["status"] == "failure":
        by_hand()


def _done_where_it_says(lab: Lab, here: Host, finding: Found, containing: str) -> None:
    """Run the lines of a fix with these words, each on the host that it is for."""
    fixes = _lines_by_host(finding, here.name)
    chosen = {
        name: lines for name, lines in fixes.items() if any(containing in one for one in lines)
    }
    assert chosen, finding["fix"]
    for name, lines in chosen.items():
        host = next(one for one in lab.hosts if name in (one.name, one.address))
        if containing.startswith("unset "):  # in the settings of a shell, which a command has not
            host.set(**dict.fromkeys(containing.split()[1:]))
        else:
            do_what_it_says(host, "\n".join(lines), containing)


def _lines_by_host(finding: Found, here: str) -> dict[str, list[str]]:
    """Return the lines of a fix by the host that the line before them names, or the finding does."""
    about = re.match(r"(node\d): ", finding["what"])
    host = about[1] if about else here
    lines: dict[str, list[str]] = {}
    for line in finding["fix"].splitlines():
        place = re.search(r"\b(?:on|at) (\S+):$", line)
        host = place[1] if place else host
        lines.setdefault(host, []).append(line)
    return lines
