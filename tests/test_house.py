"""Promise: the house rules that a reader relies on hold. Files and functions stay small, a file of tests says
what it promises and stands by itself, the changelog is kept, and `onefold.__all__` is exactly what `onefold` offers."""

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import onefold
from sizes import FOLDERS, MAX_FILE_LINES, MAX_FUNCTION_LINES, Size, measure, measure_folder

ROOT = Path(__file__).resolve().parent.parent
SIZES = [size for folder in FOLDERS for size in measure_folder(ROOT / folder)]


def named(size: Size) -> str:
    return size.path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("size", SIZES, ids=named)
def test_files_and_functions_stay_small(size):
    assert size.lines <= MAX_FILE_LINES
    assert size.function_lines <= MAX_FUNCTION_LINES, f"{size.function} is too long"


def test_the_package_is_measured():
    assert ROOT / "src" / "onefold" / "plan" / "table.py" in [size.path for size in SIZES]


SAMPLE = """class A:
    @staticmethod
    def short():
        ...

    async def long(self):
        x = 1

        return x
"""


def test_size_counts_every_line(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    assert measure(path) == Size(path=path, lines=9, function="long", function_lines=4)


TESTS = sorted((ROOT / "tests").glob("test_*.py"))
HELPERS = sorted((ROOT / "tests" / "helpers").glob("*.py"))


@pytest.mark.parametrize(("paths", "word"), [(TESTS, "Promise: "), (HELPERS, "Owns ")], ids=["tests", "helpers"])
def test_a_file_of_tests_opens_with_its_promise_and_a_helper_with_what_it_owns(paths, word):
    docs = {path.name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths}
    assert [name for name, doc in docs.items() if not doc.startswith(word)] == []


def test_no_file_of_tests_imports_from_another():
    """What two of them need is a helper's: a test that moves takes nothing of others along."""
    imports = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    names = {path.stem for path in TESTS}
    for path in (*TESTS, *HELPERS):
        assert names.isdisjoint(imports.findall(path.read_text(encoding="utf-8"))), path.name


def test_the_changelog_has_an_unreleased_part_with_entries():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert unreleased
    assert re.search(r"^### (Added|Changed|Deprecated|Removed|Fixed|Security)\n+- ", unreleased[1], re.MULTILINE)


def test_all_is_sorted():
    # The order ruff keeps (RUF022): CONSTANTS, Classes, functions and modules.
    assert onefold.__all__ == sorted(onefold.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))


def test_all_is_what_onefold_offers():
    offered = {name for name, value in vars(onefold).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    modules = {name for name in onefold.__all__ if isinstance(getattr(onefold, name), ModuleType)}
    assert set(onefold.__all__) - modules == offered


def test_every_public_object_says_what_it_is():
    assert [name for name in onefold.__all__ if not getattr(onefold, name).__doc__] == []
