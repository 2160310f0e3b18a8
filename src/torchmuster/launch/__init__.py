"""Start a script on this host or on many, and report failures between them.

See README.md in this folder.
"""
