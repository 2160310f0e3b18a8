"""Machines that join a run over TLS, without ssh.

See README.md in this folder.
"""
