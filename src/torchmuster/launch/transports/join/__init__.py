"""Machines that join a run by themselves, over TLS, without ssh.

See README.md in this folder.
"""
