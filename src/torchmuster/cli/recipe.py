"""``muster recipe``: settings files with comments, to start a training from."""

import argparse
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode, Impossible

_SUFFIX = ".yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``muster recipe``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    known = parsers.add_action(actions, "list", "list the recipes")
    parsers.add_json_flag(known)
    known.set_defaults(run=_list)

    show = parsers.add_action(
        actions, "show", "print a recipe", examples=["muster recipe show sft"]
    )
    _add_name(show)
    show.set_defaults(run=_show)

    new = parsers.add_action(
        actions,
        "new",
        "write a recipe into this folder, to edit and train with",
        examples=["muster recipe new sft", "muster recipe new sft-lora --to my.yaml"],
    )
    _add_name(new)
    new.add_argument(
        "--to", type=Path, metavar="FILE", help="the file to write (default: NAME.yaml)"
    )
    new.set_defaults(run=_new)
    parsers.show_examples(
        parser,
        [
            "muster recipe list        list the recipes",
            "muster recipe new sft     write sft.yaml: chat fine-tuning of all weights",
            "muster train --config sft.yaml --dry-run",
        ],
    )


def recipes() -> dict[str, str]:
    """Return the text of each recipe by its name."""
    return dict(sorted(_files()))


def _files() -> Iterator[tuple[str, str]]:
    for file in resources.files("torchmuster").joinpath("recipes").iterdir():
        if file.name.endswith(_SUFFIX):
            yield file.name.removesuffix(_SUFFIX), file.read_text(encoding="utf-8")


def _add_name(parser: Any) -> None:
    parser.add_argument("name", metavar="NAME", help="a recipe's name, from muster recipe list")


def _list(options: argparse.Namespace) -> int:
    known = {name: text.partition("\n")[0].removeprefix("# ") for name, text in recipes().items()}
    if options.json:
        output.print_json([{"name": name, "about": about} for name, about in known.items()])
        return ExitCode.GOOD
    width = max(map(len, known))
    for name, about in known.items():
        output.print_text(f"{name:<{width}}  {about}")
    return ExitCode.GOOD


def _show(options: argparse.Namespace) -> int:
    output.print_text(_recipe(options.name), end="")
    return ExitCode.GOOD


def _new(options: argparse.Namespace) -> int:
    text = _recipe(options.name)
    path: Path = options.to or Path(f"{options.name}{_SUFFIX}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace(f"{options.name}{_SUFFIX}", str(path)))
    except FileExistsError:
        raise Impossible(
            f"{path} already exists", why="it may have your changes", fix="use another file: --to"
        ) from None
    except OSError as error:
        raise Impossible(f"cannot write {path}", why=error.strerror or str(error)) from error
    output.print_text(f"wrote {path}: set the model and the data in it, then")
    output.print_text(f"  muster train --config {path} --dry-run    checks the settings")
    output.print_text(f"  muster train --config {path}")
    return ExitCode.GOOD


def _recipe(name: str) -> str:
    known = recipes()
    if name not in known:
        raise Impossible(f"there is no recipe {name!r}", fix=f"use one of {', '.join(known)}")
    return known[name]
