"""``muster completion``: print a shell completion script, generated from the commands."""

from dataclasses import dataclass

from torchmuster.cli import output
from torchmuster.cli.options import argument, command
from torchmuster.errors import ExitCode


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The shell."""

    shell: str = argument(
        "shell to print the script for", required=True, choices=("bash", "zsh", "fish")
    )


@command(
    CompletionOptions,
    examples=[
        'eval "$(muster completion bash)"          # in ~/.bashrc',
        "muster completion zsh > ~/.zfunc/_muster   # a folder in $fpath",
        "muster completion fish > ~/.config/fish/completions/muster.fish",
    ],
)
def run(options: CompletionOptions) -> int:
    """Print the script."""
    import shtab

    from torchmuster.cli.main import root_parser

    output.print_text(shtab.complete(root_parser(), shell=options.shell))
    return ExitCode.GOOD
