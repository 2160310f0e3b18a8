"""Starting a script on this machine or on many, and carrying failures between them.

See README.md in this folder.
"""
