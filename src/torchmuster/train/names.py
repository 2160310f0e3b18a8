"""The names people gave to parts of their model, without what wrappers add to them."""

from torchmuster.train.torch_private import WRAPPED


def own_name(name: str) -> str:
    """Return a parameter's or module's name as it is in the model that was written."""
    parts = name.split(".")
    if parts[0] == "module":  # DDP's
        parts = parts[1:]
    return ".".join(part for part in parts if part not in WRAPPED)
