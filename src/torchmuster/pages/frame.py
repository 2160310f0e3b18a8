"""The frame of every page: one self-contained file."""

from collections.abc import Iterable, Sequence
from html import escape

from torchmuster.finding import Finding

# No external resources and no scripts, whatever text from outside the page contains.
STRICT = "default-src 'none'; style-src 'unsafe-inline'"

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="POLICY">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title>
<style>
:root { color-scheme: light dark; --edge: #8884; --failure: #b00020; --warning: #8a5a00; --note: #00687a;
  --ok: #1b6e2d }
@media (prefers-color-scheme: dark) {
  :root { --failure: #ff8a80; --warning: #ffc24b; --note: #6fd3e6; --ok: #86d995 }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem }
summary { font-size: 1.1rem; font-weight: 600; margin: 1.5rem 0 .5rem; cursor: pointer }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--edge);
  vertical-align: top; white-space: nowrap }
article { border-left: 4px solid var(--edge); padding: .1rem 0 .1rem 1rem; margin: 1rem 0 }
pre { white-space: pre-wrap; margin: .3rem 0; font: 13px/1.45 ui-monospace, monospace;
  overflow-wrap: anywhere }
dt { font-size: 12px; opacity: .75 } dd { margin: 0 0 .4rem }
.failure { border-color: var(--failure) } .warning { border-color: var(--warning) }
.note { border-color: var(--note) }
b.failure { color: var(--failure) } b.warning { color: var(--warning) } b.note { color: var(--note) }
b.ok { color: var(--ok) }
figure { margin: 1rem 0; overflow-x: auto }
MORE</style>
</head>
<body>
"""


def html_page(title: str, parts: Iterable[str], *, style: str = "") -> str:
    """Return a whole page; its parts are trusted markup, ``style`` are additional CSS rules."""
    head = _HEAD.replace("POLICY", STRICT, 1).replace("MORE", style, 1)
    # Text from outside is inserted last, so that it cannot contain placeholders.
    return head.replace("TITLE", escape(title), 1) + "\n".join(parts) + "\n</body>\n</html>\n"


def html_article(finding: Finding) -> str:
    """Return a finding as a part of a page."""
    status = finding.status.value
    details = ""
    for title, text in (("why", finding.why), ("fix", finding.fix), ("seen", finding.evidence)):
        if text:
            details += f"<dt>{title}</dt><dd><pre>{escape(text)}</pre></dd>"
    return (
        f'<article class="{status}"><b class="{status}">{status}</b> {escape(finding.what)}'
        f"<dl>{details}</dl></article>"
    )


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are texts."""
    lines = [_row("th", titles)]
    for row in rows:
        lines.append(_row("td", row))
    return "<table>" + "\n".join(lines) + "</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def html_details(title: str, body: str, *, opened: bool = False) -> str:
    """Return a collapsible section; its body is markup."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"
