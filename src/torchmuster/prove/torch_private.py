"""The private name of torch that prove uses."""

from torchmuster.torch_internals import PrivateName, require

NAMES = (
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "follow the batches that a script reads",
    ),
)
require(NAMES)

from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator  # noqa: E402

__all__ = ["LoaderIterator"]
