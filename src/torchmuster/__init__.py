"""torchmuster: from "I have some GPUs" to a distributed PyTorch run that is proven to work.

The package itself does nothing at import. Start with the command ``muster --help``, from
Python with :mod:`torchmuster.distributed`, or in a notebook with ``%load_ext torchmuster``.
"""

__version__ = "0.1.0"


def load_ipython_extension(shell: object) -> None:
    """Add ``%muster``, ``%%ranks`` and ``%%rank`` to a notebook: what ``%load_ext torchmuster`` calls."""
    from torchmuster.notebook import magics

    magics.load(shell)
