"""What the documents say of themselves: links lead somewhere, written pages are complete, quotations are true."""

import re
import runpy
import subprocess
import sys
from argparse import _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

import pytest

from plan_situations import ANSWERS, FOLDER, SITUATIONS, recorded
from torchmuster.cli.main import root_parser
from torchmuster.known_errors.explain import all_rules, explain_text
from torchmuster.plan.planning import make_plan
from torchmuster.plan.report.terminal import plan_text
from torchmuster.plan.timing.rates import usual_rates

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "docs" / "reference"
PLAN_PAGE = ROOT / "docs" / "plan.md"
FLAGS = re.MULTILINE | re.DOTALL
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def anchors(document: Path) -> set[str]:
    """Return the names that headings can be linked by, as GitHub and MyST make them."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\[(.+?)\]\(.*?\)", r"\1", one)) for one in heads)
    return {one.strip().lower().replace(" ", "-") for one in words}


def links(document: Path) -> list[str]:
    """Return where a document's links lead to, but for those in code."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    return _LINK.findall(_CODE.sub("code", text))


@pytest.mark.parametrize("document", documents(), ids=lambda one: str(one.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    """Within the repository, to a file and a heading in it. Other addresses are only looked at for their form."""
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            assert re.match(r"https?://[\w.-]+\.[a-z]+(/|$)", link), link
            continue
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        assert target.exists(), f"{document.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{document.name}: {link}: {sorted(anchors(target))}"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "index.md":
            assert re.search(rf"^{re.escape(page.stem)}$", index, re.MULTILINE), page.name


def test_every_known_error_is_on_its_page_and_its_texts_lead_to_it() -> None:
    """Whoever pastes a text of the page is told the cause under which it stands."""
    page = runpy.run_path(str(WRITTEN / "error_page.py"))["page"]()
    for rule in all_rules():
        assert f"### {rule.name}\n" in page
    texts = 0
    for section in page.split("\n### ")[1:]:
        name, _, body = section.partition("\n")
        seen = re.search(r"```text\n(.*?)\n```\n\nSeen in", body, re.DOTALL)
        for line in seen[1].splitlines() if seen else []:
            assert explain_text(line)[0].name == name, line
            texts += 1
    assert texts > 100  # enough to be found by


def test_findings_of_the_catalogue_of_faults_are_on_the_page_of_findings() -> None:
    page = runpy.run_path(str(WRITTEN / "finding_page.py"))["page"]()
    listed = re.findall(r"^\| `([a-z0-9…-]+)` \| (?:failure|warning|note) \|", page, re.MULTILINE)
    assert len(listed) > 150
    known = re.compile("|".join(one.replace("…", "[a-z-]+") for one in listed))
    rows = (ROOT / "docs/measured/faults.md").read_text().splitlines()
    named = {name for row in rows for name in re.findall(r"\| `([a-z0-9-]+)`:", row)}
    assert [name for name in sorted(named) if not known.fullmatch(name)] == []


def test_the_plans_that_are_quoted_are_those_that_are_made() -> None:
    """The page of a large model quotes answers that other tests hold against recorded traces."""
    text = (ROOT / "docs/large-model.md").read_text()
    answers = {line for name in ANSWERS if name.startswith("llama-70b") for line in ANSWERS[name]}
    quoted = [
        line
        for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if "per GPU" in line
    ]
    assert len(quoted) == 3
    assert set(quoted) <= answers


def test_the_plan_that_is_shown_first_is_the_one_that_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page of plans shows an output; here it is made again, from recorded traces."""
    monkeypatch.chdir(FOLDER)
    (situation,) = (one for one in SITUATIONS if one.name == "llama-8b 8192 on 8xH100")
    request = situation.asked()
    rates = usual_rates(request.hardware.card.kind)
    made = plan_text(make_plan(request, recorded, rates=rates, simulate=False), line="")
    shown = re.search(r"```text\n(llama-8b.*?)^train with", PLAN_PAGE.read_text("utf-8"), FLAGS)
    assert shown is not None
    assert [line for line in shown[1].splitlines() if line not in (*made.splitlines(), "…")] == []


# What follows is a command of another launcher, or the script's.
FOREIGN = ("--", "torchrun", "accelerate", "python")


def commands_shown(document: Path) -> Iterator[list[str]]:
    """Return the words of each ``muster …`` that a document shows, as far as they are the command's own."""
    text = document.read_text(encoding="utf-8")
    shown = re.findall(r"^(?:    |\$ )?(muster [^\n]+)$", text, re.MULTILINE)
    shown += re.findall(r"`(muster [^`\n]+)`", text)
    for line in shown:
        words = re.split(r" [|>&#]|\|\||;|\\$", line)[0].split()
        script = next(
            (n for n, one in enumerate(words) if one.endswith(".py") or one in FOREIGN), None
        )
        yield words[1:script]


def test_every_flag_that_is_shown_is_one_of_the_command() -> None:
    unknown, root = [], root_parser()
    for document in documents():
        if document.name == "CHANGELOG.md" or "tests" in document.parts:
            continue
        for words in commands_shown(document):
            parser = root
            for word in words:
                more = [one for one in parser._actions if isinstance(one, _SubParsersAction)]
                if more and word in more[0].choices:
                    parser = more[0].choices[word]
                elif word.startswith("--") and len(word) > 2:
                    flag = word.rstrip(",.").partition("=")[0]
                    if flag not in parser._option_string_actions:
                        unknown.append(f"{document.name}: muster {' '.join(words)}: {flag}")
    assert unknown == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse writes its help differently")
def test_reference_pages_are_those_of_the_code(pytestconfig: pytest.Config) -> None:
    """To renew them: python docs/reference/write_pages.py, or --snapshot-update."""
    written = runpy.run_path(str(WRITTEN / "write_pages.py"))["pages"]()
    if pytestconfig.getoption("update_snapshots"):
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
    stale = [path.name for path, text in written.items() if path.read_text("utf-8") != text]
    assert stale == []
