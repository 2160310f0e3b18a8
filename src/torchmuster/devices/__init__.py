"""What accelerators are here, who uses them, which to take; claims. No torch.

Import from the modules; the README of this folder says which one has what.
"""
