"""Checks of one host (``muster doctor``) and of a group (``muster check``).

This package imports nothing: import the module that you need.
"""
