"""Owns `python -m onefold`, which is the command `onefold`."""

from onefold.cli.main import main

if __name__ == "__main__":
    main()
