"""Test and measure the links between hosts.

``survey.py`` runs the tests and ``judge.py`` turns them into findings. ``dial.py`` is what each host does for it.
"""
