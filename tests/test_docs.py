"""Promise: the documentation is true. Its code runs and prints what it says, and what it names exists.

A page is one script: its ```python blocks run in order in one namespace, on one rank. A ```text block right after one
holds what that block printed; `...` in it stands for anything, and line breaks count as spaces.
"""

import inspect
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

import deepspeed_keys
import house
import onefold
from onefold import errors

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "onefold"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", PACKAGE / "README.md", *sorted(DOCS.rglob("*.md"))]
HOWTO = [page for page in PAGES if page.parent.name == "howto"]
DECISIONS = [page for page in PAGES if page.parent.name == "decisions" and not page.name.startswith("0000")]

# What the reader of a page has already. Only where a page talks about "your model" without showing one.
HAS_ALREADY = {
    "README.md": """
import torch

class Output(torch.Tensor):
    @property
    def loss(self):
        return self

class YourModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.norm(x)).square().mean().as_subclass(Output)

model = YourModel()
loader = [{"x": torch.randn(8, 4)} for _ in range(2)]
first, second = torch.randn(8, 4), torch.randn(8, 4)
"""
}


def named(page):
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its language, its text, the line it starts on, and what stands between it and the last one."""

    language: str
    text: str
    line: int
    before: str


def blocks(page_text):
    found, end = [], 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page_text, re.MULTILINE | re.DOTALL):
        line = page_text.count("\n", 0, match.start(2))
        found.append(Block(language=match[1], text=match[2], line=line, before=page_text[end : match.start()]))
        end = match.end()
    return found


def as_pattern(expected):
    """A regular expression for printed text: `...` is anything, any white space is any other."""
    parts = (r"\s+".join(re.escape(word) for word in part.split()) for part in expected.split("..."))
    return r"\s*" + r"\s*.*?\s*".join(parts) + r"\s*"


def run(page_text, name, prelude=""):
    """Run a page; the errors point at its lines."""
    namespace = {"__name__": "__main__"}
    exec(prelude, namespace)
    printed = None
    for block in blocks(page_text):
        if block.language == "python":
            out = StringIO()
            with redirect_stdout(out):
                exec(compile("\n" * block.line + block.text, name, "exec"), namespace)
            printed = out.getvalue()
        elif block.language == "text" and printed is not None and not block.before.strip():
            matches = re.fullmatch(as_pattern(block.text), printed, re.DOTALL)
            assert matches, f"{name}, line {block.line}: this was printed\n{printed}"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch says it of itself as it sets up to compile
@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=named)
def test_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page.read_text(), str(page), HAS_ALREADY.get(named(page), ""))


SAMPLE = "```python\nx = 2\n```\nand\n```python\nprint(f'{x:.1f} is\\nfound')\n```\n\n```text\n{}\n```\n"


@pytest.mark.parametrize("said", ["2.0 is found", "2... found", "..."])
def test_a_true_page_passes(said):
    run(SAMPLE.replace("{}", said), "sample")


@pytest.mark.parametrize("said", ["3.0 is found", "2.0 is found.", "2.0 ... lost", "found"])
def test_a_false_page_fails(said):
    with pytest.raises(AssertionError, match="this was printed"):
        run(SAMPLE.replace("{}", said), "sample")


def test_a_page_that_does_not_run_fails_on_its_own_line():
    with pytest.raises(ZeroDivisionError) as caught:
        run("One\n\n```python\n1 / 0\n```\n", "sample")
    assert (caught.traceback[-1].frame.code.raw.co_filename, caught.traceback[-1].lineno + 1) == ("sample", 4)


# --- names of things that exist


def anchors(text):
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), target


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=named)
def test_source_and_test_files_named_exist(page):
    for path in re.findall(r"`((?:src|csrc|tests|examples|benchmarks|scripts|docs)/[\w./]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [*HOWTO, *DECISIONS], ids=named)
def test_the_index_leads_to_every_page(page):
    assert f"({page.relative_to(DOCS).as_posix()})" in (DOCS / "index.md").read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=named)
def test_a_decision_has_the_parts_of_the_template(page):
    parts = [
        re.findall(r"^## .*$", each.read_text(), re.MULTILINE) for each in (page, DOCS / "decisions/0000-template.md")
    ]
    assert parts[0] == parts[1]


# --- how it works inside

ARCHITECTURE = DOCS / "architecture.md"
MOST_WORDS = 1500
NOT_YET = {"activations/"}
"""Rooms that the page sends a change to and that come with the first such change."""


def test_the_picture_of_the_house_is_drawn_from_the_code():
    drawn = house.draw(house.reduced(house.graph()))
    assert house.SVG.read_text() == drawn, "run: python scripts/house.py"


def test_the_tables_of_the_house_are_those_that_the_code_gives():
    text = ARCHITECTURE.read_text()
    assert house.page(text) == text, "run: python scripts/house.py"
    assert all(f"| `{room.replace('.', '/')}` |" in text for room in house.levels(house.graph()) if room != house.ROOF)


def test_the_architecture_can_be_read_in_ten_minutes():
    assert sum(bool(re.search(r"\w", word)) for word in ARCHITECTURE.read_text().split()) <= MOST_WORDS


def test_files_that_the_architecture_names_are_there():
    paths = set(re.findall(r"`([\w*]+/[\w*/]*(?:\.py)?)`", ARCHITECTURE.read_text()))
    there = {path for path in paths if any(PACKAGE.glob(path)) or (ROOT / path).exists()}
    assert paths - there <= NOT_YET


def test_names_that_the_architecture_uses_are_defined():
    names = set(re.findall(r"`(\w+)(?:\(\))?`", ARCHITECTURE.read_text()))
    names -= {path.name for path in PACKAGE.rglob("*") if path.is_dir()} | house.ROOMS.keys()
    code = "\n".join(path.read_text() for path in (*PACKAGE.rglob("*.py"), house.TABLE))
    forms = r"^\s*(class|def|import) {0}\b|^{0}\b.* = "
    assert [name for name in names if not re.search(forms.format(name), code, re.MULTILINE)] == []


def test_every_note_that_code_and_pages_cite_is_written():
    essays = {title for titles in house.notes().values() for title in titles}
    cited = set()
    for path in (*PACKAGE.rglob("*.py"), *PAGES):
        cited.update(re.findall(r"\[Note: ([^\]]+)\]", path.read_text()))
    assert cited == essays


# --- the how-tos


def test_every_error_is_explained():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(re.findall(r"^## (\w+Error)$", (DOCS / "howto/errors.md").read_text(), re.MULTILINE)) == classes


@pytest.mark.parametrize("name", [name for name in onefold.__all__ if name != "errors"])
def test_every_public_name_is_shown_in_a_how_to(name):
    shown = "\n".join(block.text for page in HOWTO for block in blocks(page.read_text()) if block.language == "python")
    assert re.search(rf"\b(onefold\.{name}|import .*\b{name})\b", shown)


# --- the table of DeepSpeed's keys


def test_the_table_of_deepspeed_keys_is_the_one_the_code_declares():
    text = deepspeed_keys.PAGE.read_text()
    assert deepspeed_keys.page(text) == text, "run: python scripts/deepspeed_keys.py"
    assert deepspeed_keys.rows() in text
