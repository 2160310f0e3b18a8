"""A plan on one screen: what was asked, the ways, what fills a card, the choice, and how to train so."""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.report.terminal import columns
from torchmuster.finding import render
from torchmuster.plan.answer import Answer
from torchmuster.plan.hardware.given import in_words
from torchmuster.plan.planning import cost_of
from torchmuster.plan.report.figures import number, remarks, scaling, table
from torchmuster.plan.report.picture import parts, place, spare
from torchmuster.plan.search.decide import passed_over_in_words
from torchmuster.redaction import harmless
from torchmuster.units import format_bytes, plural

_BAR = 40
_MOST_ROWS = 10
# A number stays with its unit; the sign that joins them is one that textwrap knows no border in.
_AMOUNT = re.compile(r"(\d) ([KMGT]iB|%|tokens/s|samples/s|cards?|ranks?)")
_JOINED = "\N{NO-BREAK SPACE}"


def text(answer: Answer, *, line: str, width: int = 100, colour: bool = False) -> str:
    """Return the whole report; ``line`` is the command that trains so."""
    blocks = [
        [question(answer)],
        [*_table(answer, width)],
        [*_picture(answer)],
        [*_verdict(answer, width)],
        [*_sources(answer, width)],
    ]
    if answer.findings:
        blocks.append([render(answer.findings, width=width, colour=colour)])
    machines = math.ceil(
        answer.chosen.value.candidate.layout.ranks / answer.asked.hardware.cards_per_machine
    )
    where = f", on {machines:,} machines" if machines > 1 else ""
    blocks.append([f"to train so{where}:", f"  {line}"])
    return "\n\n".join("\n".join(block) for block in blocks)


def question(answer: Answer) -> str:
    """Say in one line what was asked."""
    asked = answer.asked
    parts_of_it = [str(asked.work.model_name_or_path or asked.work.build)]
    if answer.parameter_count is not None:
        parts_of_it.append(f"{number(answer.parameter_count)} parameters")
    if answer.tokens_per_sample is not None:
        parts_of_it.append(f"{answer.tokens_per_sample:,} tokens a sample")
    if asked.global_batch_size is not None:
        parts_of_it.append(f"global batch {asked.global_batch_size:,}")
    card = asked.hardware.card
    where = f"on {in_words(asked.hardware)} ({format_bytes(card.memory_bytes)} a {card.noun})"
    return harmless(f"{', '.join(parts_of_it)}, {where}")


def _table(answer: Answer, width: int) -> Iterator[str]:
    titles, rows = table(answer, wide=False)
    yield from columns([titles, *rows[:_MOST_ROWS]])
    if len(rows) > _MOST_ROWS:
        yield f"and {plural(len(rows) - _MOST_ROWS, 'row')} more, which --json and --html have"
    for sentence in remarks(answer):
        yield from _wrapped("speed", sentence, width)
    for sentence in passed_over_in_words(answer.passed_over):
        yield from _wrapped("not", sentence, width)


def _picture(answer: Answer) -> Iterator[str]:
    one = answer.chosen.value
    whole = max(answer.asked.hardware.card.memory_bytes, one.memory.total_bytes)
    yield f"memory of a {answer.asked.hardware.card.noun} at its peak, {place(one)}"
    left = spare(one, answer.asked)
    shown = [(part.name, part.size_bytes, "█") for part in parts(one)]
    shown.append(("left over", max(left, 0), "░"))
    longest = max(len(name) for name, _, _ in shown)
    for name, size, ink in shown:
        bar = ink * round(_BAR * size / whole)
        yield f"  {name:<{longest}}  {format_bytes(size):>9}  {bar}".rstrip()


def _verdict(answer: Answer, width: int) -> Iterator[str]:
    yield from _wrapped("chosen", answer.chosen.reason, width)
    if answer.runner_up is not None:
        yield from _wrapped("then", answer.runner_up.reason, width)
    for sentence in answer.would_change:
        yield from _wrapped("else", sentence, width)
    if waiting := scaling(answer):
        yield from _wrapped("scaling", waiting, width)
    memory = answer.chosen.value.memory
    saving = f"a checkpoint takes {format_bytes(memory.save_bytes)} on the disk"
    if memory.save_host_bytes:
        saving += f", and {format_bytes(memory.save_host_bytes)} of a machine's memory to be saved beside the training"
    if memory.host_bytes:
        saving += f"; offload keeps {format_bytes(memory.host_bytes)} in a machine's memory"
    yield from _wrapped("saving", saving, width)
    cost = cost_of(answer.chosen.value, answer.asked)
    if cost is not None and answer.asked.tokens is not None:
        words = f"{number(answer.asked.tokens)} tokens take {number(cost.hours)} hours"
        if cost.price is not None:
            words += f" and cost {number(cost.price)}"
        yield from _wrapped("whole", words, width)


def _sources(answer: Answer, width: int) -> Iterator[str]:
    for kind, source in answer.sources:
        yield from _wrapped("from", f"{kind}: {source}", width)


def _wrapped(title: str, sentence: str, width: int) -> Sequence[str]:
    lines = textwrap.wrap(
        _AMOUNT.sub(rf"\1{_JOINED}\2", harmless(sentence)),
        width,
        initial_indent=f"{title:<8}",
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_JOINED, " ") for line in lines]
