"""The room of the command line: `onefold COMMAND`, a file in `commands` for each command. May import everything."""
