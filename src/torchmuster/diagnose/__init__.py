"""Checks of one machine (``muster doctor``) and of a group (``muster check``), and error texts explained.

Nothing is imported here: import the module that has what you need.
"""
