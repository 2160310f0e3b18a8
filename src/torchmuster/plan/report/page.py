"""A plan as one page that needs no other file and no network."""

from html import escape

from torchmuster.pages import frame
from torchmuster.pages.frame import article, folded
from torchmuster.pages.frame import table as cells
from torchmuster.plan.answer import Answer
from torchmuster.plan.report.bars import bars
from torchmuster.plan.report.figures import remarks, scaling, table
from torchmuster.plan.report.terminal import question
from torchmuster.plan.search.decide import passed_over_in_words


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
        folded(
            "where the figures come from", cells(("figure", "source"), answer.sources), opened=True
        ),
    ]
    return frame.page("muster plan", parts)


def _sentences(answer: Answer) -> list[str]:
    found = [] if answer.runner_up is None else [f"runner-up: {answer.runner_up.reason}"]
    found += answer.would_change
    found += [sentence for sentence in (scaling(answer), *remarks(answer)) if sentence]
    return found + passed_over_in_words(answer.passed_over)
