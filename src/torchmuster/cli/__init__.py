"""The ``muster`` command: one module per subcommand, imported when it is used, none with torch."""
