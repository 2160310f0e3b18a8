"""Detect accelerators, show who uses them, choose among them and claim them. No torch.

Import from the modules; the README of this folder lists them.
"""
