"""Measure the links between hosts.

``survey.py`` runs the measurements and ``judge.py`` turns them into findings. Each host opens ports
for the others (``serve.py``) and connects to them (``call.py``).
"""
