"""The page of the Python API, written from the signatures and docstrings of the public names."""

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torchmuster

TOPICS = {
    "Start and join": """join_world World rank_zero_first sum_over_ranks seed_everything StopRequest
        StoppedAtRequest""",
    "Data": """BatchLoader StreamLoader DataLoaderAdapter TokenRows write_tokens
        ignore_signals_in_workers""",
    "Any script": "log log_evaluation",
    "Train": """Trainer Evaluation Reports TrainStep evaluate cross_entropy language_model schedule
        choose_precision precision_support BadNumbers""",
    "Checkpoints": """CheckpointSettings Checkpointer open_store newest_good save_weights
        save_adapters""",
    "Models and strategies": """choose_strategy build_strategy ModelSizes Sharding build_on_rank_0
        recompute_blocks compile_blocks add_lora""",
    "Out of memory and other errors": "oom_report MusterError Finding Decision explain_text",
    "GPUs": """get_available_gpus select_gpus auto_select_gpus_for_model set_visible_gpus
        setup_gpu_environment get_optimal_device get_gpu_info print_gpu_info get_gpu_memory_usage
        get_device_info benchmark_matmul GPUMonitor""",
    "Process groups and legacy API": """setup_distributed cleanup_distributed get_local_rank
        get_group_info verify_gpu_communication check_connection create_distributed_dataloader
        DDPTrainer ProductionTrainer reduce_mean sync_gradients""",
}
HEAD = """\
# Python API

`from torchmuster import NAME`. Importing the package does not import torch; a name is imported when it is first used. A test freezes these
names and their signatures; everything else may change between versions. How to use them: [Trainer](../trainer.md), [data](../data.md),
[Python](../python.md), [examples](../examples.md).

| topic | names |
|---|---|"""


def page() -> str:
    """Return the page; every public name must have a topic."""
    topics = {topic: names.split() for topic, names in TOPICS.items()}
    assert sorted(name for names in topics.values() for name in names) == torchmuster.__all__
    parts = [HEAD]
    for topic, names in topics.items():
        parts.append(f"| {topic} | {' '.join(f'[`{name}`](#{name.lower()})' for name in names)} |")
    for topic, names in topics.items():
        parts += [f"\n## {topic}", *(_section(name) for name in names)]
    return "\n".join(parts) + "\n"


def _section(name: str) -> str:
    thing = getattr(torchmuster, name)
    parameters = inspect.signature(thing).parameters.values()
    init = vars(thing).get("__init__") if inspect.isclass(thing) else None
    texts = [inspect.getdoc(thing), init and init.__doc__ and inspect.getdoc(init)]
    prose, about = _split("\n\n".join(filter(None, texts)), [one.name for one in parameters])
    kind = "class" if inspect.isclass(thing) else "def"
    head = textwrap.fill(f"{kind} {name}{_call(thing)}", 100, subsequent_indent="    ")
    arguments: list[tuple[str, ...]] = []
    methods: list[tuple[str, ...]] = []
    for one in parameters:
        field = rf"^    {one.name}: .*?  # (.*)$"  # a dataclass documents its fields in comments
        comment = re.search(field, inspect.getsource(thing), re.MULTILINE)
        text = ". ".join(about[one.name]) or (comment[1] if comment else "")
        default = "required" if one.default is one.empty else f"`{_Shown(one.default)}`"
        arguments.append((f"`{one.name}`", f"`{_type(one.annotation)}`", default, text))
    for base in reversed(getattr(thing, "__mro__", ())):
        for method, value in vars(base).items() if "torchmuster" in base.__module__ else ():
            if method[0] != "_" and (inspect.isfunction(value) or isinstance(value, property)):
                call = _call(value) if inspect.isfunction(value) else ""
                methods.append(
                    (f"`{method}{call}`", (inspect.getdoc(value) or "").split("\n\n")[0])
                )
    tables = [
        _table(("argument", "type", "default", ""), arguments),
        _table(("method or property", ""), methods),
    ]
    return "\n\n".join([f"\n### {name}", f"```py\n{head}\n```", prose, *filter(None, tables)])


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[_plain(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [titles, ["---"] * len(titles), *cells] if rows else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _call(thing: Callable[..., Any]) -> str:
    """Return a signature without the types of its arguments, which are in the table."""
    signature = inspect.signature(thing)
    arguments = [
        one.replace(
            annotation=one.empty,
            default=one.default if one.default is one.empty else _Shown(one.default),
        )
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    call = str(inspect.Signature(arguments))
    if inspect.isclass(thing):
        return call
    returned = _type(signature.return_annotation)
    if hasattr(thing, "__wrapped__"):  # @contextmanager of a function that yields
        returned = returned.replace("Iterator", "AbstractContextManager")
    return f"{call} -> {returned}"


def _split(doc: str, names: list[str]) -> tuple[str, dict[str, list[str]]]:
    """Return a docstring without the sentences that begin with an argument, and these by argument."""
    prose: list[str] = []
    about: dict[str, list[str]] = {name: [] for name in names}
    for number, paragraph in enumerate(doc.split("\n\n")):
        if paragraph.startswith("    "):
            prose.append(f"```py\n{textwrap.dedent(paragraph)}\n```")
            continue
        kept = []
        for sentence in re.split(r"(?<=\.) (?=[A-Z`])|(?<=;) (?=``)", " ".join(paragraph.split())):
            found = re.findall(r"``(\w+)``", " ".join(sentence.split()[:4]))
            its = [name for name in found if name in about]
            for name in its:
                about[name].append(re.sub(rf"^``{name}`` (?:is|are) ", "", sentence.rstrip(";.")))
            if number == 0 or not its:  # the first paragraph stays whole
                kept.append(sentence)
        prose += [_plain(" ".join(kept)).replace("::", ":")] if kept else []
    return "\n\n".join(prose), about


def _plain(text: str) -> str:
    return re.sub(r":\w+:(?=`)", "", " ".join(text.split())).replace("``", "`")


def _type(annotation: Any) -> str:
    text = inspect.formatannotation(annotation).strip("'")
    short = re.sub(r"\b(?!torch\.(?:device|Tensor))(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
    return re.sub(r"[~+](?=[A-Z])", "", short)


class _Shown:
    """A default as the page shows it: functions and precisions by name, never with an address."""

    def __init__(self, value: object) -> None:
        name = getattr(value, "__name__", getattr(value, "name", repr(value)))
        self._text = "…" if name == "<lambda>" else str(name)

    def __repr__(self) -> str:
        return self._text
