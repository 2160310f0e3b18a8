"""torchmuster: from "I have some GPUs" to a distributed PyTorch run that is proven to work.

The package itself does nothing at import. Start with the command ``muster --help``, or from
Python with :mod:`torchmuster.distributed`.
"""

__version__ = "0.1.0"
