"""``muster completion``: print a shell completion script, generated from the commands."""

import argparse

from torchmuster.cli import output, parsers
from torchmuster.errors import ExitCode

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell's name."""
    parsers.show_examples(
        parser,
        [
            'eval "$(muster completion bash)"          # in ~/.bashrc',
            "muster completion zsh > ~/.zfunc/_muster   # a folder in $fpath",
            "muster completion fish > ~/.config/fish/completions/muster.fish",
        ],
    )
    parser.add_argument("shell", choices=SHELLS, help="shell to print the script for")
    parser.set_defaults(run=_run_completion)


def _run_completion(options: argparse.Namespace) -> ExitCode:
    import shtab

    from torchmuster.cli.main import root_parser

    output.print_text(shtab.complete(root_parser(), shell=options.shell))
    return ExitCode.GOOD
