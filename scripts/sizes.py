"""Owns how size is measured: lines of a file, lines of its longest function.

`python scripts/sizes.py [FOLDER ...]` prints the table; `tests/test_house.py` holds the limits with the same numbers.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "examples", "tests", "benchmarks", "scripts")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Lines of one file, and of its longest function (from `def` to its last line, docstring included)."""

    path: Path
    lines: int
    function: str
    function_lines: int


def measure(path: Path) -> Size:
    """Measure one Python file."""
    source = path.read_text(encoding="utf-8")
    functions = [
        (node.end_lineno - node.lineno + 1, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    longest, name = max(functions, default=(0, "-"))
    return Size(path=path, lines=len(source.splitlines()), function=name, function_lines=longest)


def measure_folder(folder: Path) -> list[Size]:
    """Measure every Python file below `folder`, in path order."""
    return [measure(path) for path in sorted(folder.rglob("*.py"))]


def table(folders: list[Path]) -> str:
    """One row a file and a sum a folder; numbers over a limit carry a `!`."""
    rows = [f"{'file':<44}{'lines':>7}  longest function"]
    for folder in folders:
        sizes = measure_folder(folder)
        for size in sizes:
            lines = f"{size.lines}{'!' if size.lines > MAX_FILE_LINES else ' '}"
            function = (
                f"{size.function_lines:>4}{'!' if size.function_lines > MAX_FUNCTION_LINES else ' '} {size.function}"
            )
            rows.append(f"{size.path.relative_to(ROOT).as_posix():<44}{lines:>8}{function}")
        rows.append(f"{folder.relative_to(ROOT).as_posix() + ' in all':<44}{sum(size.lines for size in sizes):>7}")
    return "\n".join(rows)


if __name__ == "__main__":
    names = sys.argv[1:] or FOLDERS
    print(table([ROOT / name for name in names if (ROOT / name).is_dir()]))
