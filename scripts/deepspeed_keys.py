"""Writes the table of docs/howto/deepspeed-config.md from the declared keys: python scripts/deepspeed_keys.py."""

from pathlib import Path

from onefold.deepspeed.report import manual

PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto" / "deepspeed-config.md"
START = "| key | default | what becomes of it |\n|---|---|---|\n"


def rows() -> str:
    """The rows of the table, one for each key."""
    return "".join(f"| `{path}` | {default} | {word}: {text} |\n" for path, default, word, text in manual())


def page(text: str) -> str:
    """`text` with its table written anew."""
    before, _, rest = text.partition(START)
    after = rest[rest.index("\n\n") + 1 :] if "\n\n" in rest else ""
    return f"{before}{START}{rows()}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
