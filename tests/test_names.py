"""Promise: one name means one thing. A class, or a function that other modules may call, has a name of its own in the
package; the few that do not are in the tables below, with the reason."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "onefold"

CLASSES = {
    **dict.fromkeys(("Adagrad", "Adam", "AdamW", "Lion", "SGD"), "a rule, and the optimizer of users that runs it"),
    "Entry": "being renamed: what a checkpoint holds (checkpoint), a tensor to be written (files)",
    "Job": "being renamed: a load under way (checkpoint), a run that a scheduler starts (launch)",
    "Plan": "being renamed: the table (plan), a rule as kernels want it (optim/kernels)",
    "Run": "being renamed: memory that a kernel updates (optim/kernels), a range of a flat buffer (optim)",
}
FUNCTIONS = {
    "command": "a file in cli/commands is a command by this name",
    "main": "where a program begins",
    "load": "what users call, in the folder; what it does, in a file of it",
    "save": "what users call, in the folder; what it does, in a file of it",
    "join": "being renamed: a process joins the others (comm), two halves of a number (plan)",
    "plan_of": "being renamed: of a configuration (deepspeed), of a rule (optim/kernels)",
}


def classes(source: str) -> set[str]:
    """The classes of a module, without the underscore of private ones."""
    return {node.name.removeprefix("_") for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def functions(source: str) -> set[str]:
    """The functions of a module that other modules may call."""
    found = (node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {name for name in found if not name.startswith("_")}


def shared(modules: Iterable[tuple[str, set[str]]]) -> dict[str, list[str]]:
    """Names that several modules define, and which these are."""
    where = defaultdict(list)
    for module, names in modules:
        for name in names:
            where[name].append(module)
    return {name: found for name, found in sorted(where.items()) if len(found) > 1}


@pytest.mark.parametrize(
    ("names_in", "allowed"), [(classes, CLASSES), (functions, FUNCTIONS)], ids=["class", "function"]
)
def test_a_name_means_one_thing(names_in, allowed):
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = shared((module, names_in(source)) for module, source in sorted(sources.items()))
    more = {name: where for name, where in found.items() if name not in allowed}
    assert not more, f"rename all but one: {more}"
    assert not allowed.keys() - found.keys(), "these have one meaning now: take them out of the table"


def test_a_name_that_two_modules_define_is_found():
    first = "class _Plan:\n    pass\ndef run():\n    pass\ndef _run():\n    class Inner:\n        pass\n"
    second = "class Plan:\n    pass\nclass Inner:\n    pass\nasync def run():\n    pass\ndef _run():\n    pass\n"
    assert shared([("a", classes(first)), ("b", classes(second))]) == {"Plan": ["a", "b"]}
    assert shared([("a", functions(first)), ("b", functions(second))]) == {"run": ["a", "b"]}
