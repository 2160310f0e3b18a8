"""The private name of torch that prove uses."""

from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

# Private names, and what each is for:
# - torch.utils.data.dataloader._BaseDataLoaderIter: follow the batches that a script reads

__all__ = ["LoaderIterator"]
