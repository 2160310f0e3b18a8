"""A plan as one page that needs no other file and no network."""

from html import escape

from torchmuster.plan.answer import Answer
from torchmuster.plan.report.bars import bars
from torchmuster.plan.report.figures import remarks, scaling, table
from torchmuster.plan.report.terminal import question
from torchmuster.plan.search.decide import passed_over_in_words
from torchmuster.verify.report.page import article, head
from torchmuster.verify.report.page import table as cells


def page(answer: Answer, *, line: str) -> str:
    """Return the page. Everything that came from outside is shown as text, never as markup."""
    titles, rows = table(answer)
    parts = [
        f'<h1>muster plan: <b class="ok">{escape(answer.chosen.reason.partition(":")[0])}</b></h1>',
        f"<p>{escape(question(answer))}</p>",
        f"<p>{escape(answer.chosen.reason)}</p>",
        f"<pre>{escape(line)}</pre>",
        *(article(one) for one in answer.findings),
        f"<figure>{bars(answer)}</figure>",
        cells(titles, rows),
        "<ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in _sentences(answer)),
        "</ul>",
        "<details open><summary>where the figures come from</summary>",
        cells(("figure", "source"), answer.sources),
        "</details>",
    ]
    return head("muster plan") + "\n".join(parts) + "\n</body>\n</html>\n"


def _sentences(answer: Answer) -> list[str]:
    found = [] if answer.runner_up is None else [f"runner-up: {answer.runner_up.reason}"]
    found += answer.would_change
    found += [sentence for sentence in (scaling(answer), *remarks(answer)) if sentence]
    return found + passed_over_in_words(answer.passed_over)
