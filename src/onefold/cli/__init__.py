"""The room of the command `onefold`: a file in `commands` is a command. May import everything."""
