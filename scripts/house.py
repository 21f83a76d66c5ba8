"""Draws docs/house.svg from the table of floors: python scripts/house.py."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDE, TALL, LEFT, ROOM, GAP = 920, 60, 170, 703, 5


def floors() -> list[tuple[str, tuple[str, ...]]]:
    """The table in tests/test_floors.py, lowest first, with the files that exist."""
    tree = ast.parse((ROOT / "tests" / "test_floors.py").read_text())
    table = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    package = ROOT / "src" / "onefold"
    return [
        (name, tuple(m for m in row if (package / f"{m}.py").exists() or (package / m).is_dir()))
        for name, row in table
        if name != "roof"
    ]


def draw(rows: list[tuple[str, tuple[str, ...]]]) -> str:
    bottom = 74 + TALL * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {bottom + 28}" font-family="sans-serif" '
        'font-size="14">',
        "<title>The floors of Onefold</title>",
        f'<rect width="{WIDE}" height="{bottom + 28}" fill="#ffffff"/>',
        '<polygon points="40,70 460.0,8 880,70" fill="#f2e3d0" stroke="#8a6d4b"/>',
        '<text x="460.0" y="54" text-anchor="middle" font-weight="bold">import onefold</text>',
    ]
    for place, (name, row) in enumerate(reversed(rows)):
        top, number = 74 + TALL * place, len(rows) - 1 - place
        width = min(98.0, (ROOM - GAP * (len(row) - 1)) / len(row))
        size = 14 if width > 80 else 12 if width > 66 else 11
        lines.append(f'<rect x="40" y="{top}" width="840" height="56" fill="#f7f7f5" stroke="#8a8a85"/>')
        lines.append(f'<text x="54" y="{top + 33}" font-weight="bold">{number} {name}</text>')
        for column, module in enumerate(reversed(row)):
            x = LEFT + column * (width + GAP)
            lines.append(
                f'<rect x="{x:.1f}" y="{top + 12}" width="{width:.1f}" height="32" rx="4" fill="#ffffff" '
                'stroke="#4a6f8a"/>'
            )
            lines.append(
                f'<text x="{x + width / 2:.1f}" y="{top + 32}" text-anchor="middle" font-size="{size}">{module}</text>'
            )
    lines.append(
        f'<text x="40" y="{bottom + 16}" fill="#555555">A file imports only from floors below, and on its own floor '
        "only from files to its right.</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs" / "house.svg").write_text(draw(floors()))
