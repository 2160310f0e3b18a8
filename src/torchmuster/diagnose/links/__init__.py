"""Measuring the links between machines.

``survey.py`` is the course of it and ``judge.py`` what is made of it. Each machine opens ports for the
others (``serve.py``), and calls them (``call.py``, ``measure.py``, ``datagrams.py``).
"""
