"""YAML + environment + flags -> frozen settings, each value with its source.

Import from the modules; the README of this folder lists them.
"""
