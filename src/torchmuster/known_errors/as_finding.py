"""An explanation as a finding, so that the one renderer and the one JSON form serve it too."""

from torchmuster.finding import Finding, Status
from torchmuster.known_errors.explain import Explanation, explain, own_mistake

_COLLECT = """\
muster doctor                              # is this machine sound?
muster check --hosts A,B                   # are the machines, and the ways between them?
TORCH_DISTRIBUTED_DEBUG=DETAIL NCCL_DEBUG=WARN TORCH_SHOW_CPP_STACKTRACES=1 muster run train.py
then look at the log of the rank that failed first: runs/<id>/logs/rank-<n>.log"""


def findings_of(text: str) -> list[Finding]:
    """Return the findings that explain a text: the cause, then what else was seen; or that it is unknown."""
    if not text.strip():
        return [_silence()]
    explanations = explain(text)
    if not explanations:
        return [_unknown(text)]
    cause, *others = explanations
    return [as_finding(cause), *(as_finding(one, status=Status.NOTE) for one in others)]


def as_finding(explanation: Explanation, *, status: Status = Status.WARNING) -> Finding:
    """Return the finding that says what an explanation says.

    It is no failure: the text was explained, and it is not known whether the fault is still there.
    """
    return Finding(
        name=explanation.name,
        status=status,
        what=f"{explanation.name}: {explanation.what}",
        why=explanation.why,
        fix=f"to make sure:\n{_indented(explanation.confirm)}\nto mend it:\n{_indented(explanation.fix)}",
        evidence=explanation.evidence,
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _silence() -> Finding:
    return Finding(
        name="no-error-text",
        status=Status.NOTE,
        what="there is no text to explain",
        why="a run that hangs often says nothing: torchrun waits without a word for machines that were not "
        "started, were told another meeting point, or meet at a port that another program holds",
        fix="look for what it waits for:\n"
        "muster check --hosts A,B   # the machines, and the ways between them\n"
        "or start it so that it says what it waits for:\n"
        "muster run --hosts A,B train.py",
    )


def _unknown(text: str) -> Finding:
    mistake = own_mistake(text)
    why = "none of the known error texts is in it"
    if mistake:
        why += (
            "; the first exception looks like one of the script's own, and errors about lost or late "
            "ranks after it only follow from it"
        )
    return Finding(
        name="unknown-error",
        status=Status.NOTE,
        what="unknown: this text is not explained by anything known here",
        why=why,
        fix=f"collect more, from the rank that failed first:\n{_COLLECT}",
        evidence=mistake,
    )
