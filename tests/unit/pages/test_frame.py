"""Every page is one file, in which nothing runs that is not ours."""

from torchmuster.finding import Finding, Status
from torchmuster.pages import frame

EVIL = "</title><script>alert(1)</script>"


def test_a_page_may_load_and_run_nothing() -> None:
    page = frame.html_page(EVIL, ["<p>one</p>", "<p>two</p>"])
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert "<script" not in page
    assert "&lt;/title&gt;&lt;script&gt;" in page
    assert page.endswith("<p>one</p>\n<p>two</p>\n</body>\n</html>\n")


def test_a_page_may_run_no_script_and_its_title_is_a_text() -> None:
    page = frame.html_page("<TITLE> MORE POLICY", [], style=".x { color: red }\n")
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert "<script" not in page
    assert "<title>&lt;TITLE&gt; MORE POLICY</title>" in page
    assert ".x { color: red }" in page


def test_findings_tables_and_parts_show_texts() -> None:
    finding = Finding(name="x", status=Status.WARNING, what=EVIL, why=EVIL, fix=EVIL, evidence=EVIL)
    for markup in (
        frame.html_article(finding),
        frame.html_table((EVIL,), [(EVIL,)]),
        frame.html_details(EVIL, "", opened=True),
    ):
        assert "<script" not in markup
        assert "&lt;script&gt;" in markup
    assert frame.html_details("a", "b") == "<details><summary>a</summary>b</details>"
