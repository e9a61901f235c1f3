"""The documentation is true: its snippets run, its commands print what is shown, its links lead somewhere.

How a document is read. The blocks of one document share a namespace and a directory, in order:

* a python block whose first line is a comment with a file name is written to that file and imported; any other one is
  executed, and a text block right after it shows lines of what it printed;
* in a console block, lines that start with `$` are commands; what follows each of them are lines of its output. The
  exit status is 0 unless the command ends with a comment such as `# exit status 1`;
* shown lines must occur in this order; `...` stands for anything, also for lines left out; times and rounding errors
  may differ;
* `<!-- not run -->` before a block leaves it out.

Documents are about the default code generator; here they run with `aten`, which shows the same passes and needs no C++
compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import turbogr_compile
from turbogr_compile import commands as cli
from turbogr_compile.pipeline import catalogue

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXECUTED = ("python", "text", "console", "sh")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
_FILE = re.compile(r"^# (?P<name>[\w./]+\.py)$")
_STATUS = re.compile(r"\s+# exit status (?P<status>\d+)$")
_RUNNABLE = re.compile(r"^(turbogr|python|cat|ls|[A-Z_]+=\S+)(\s|$)")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str
    runs: bool

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One `$ command` of a console block and the lines shown below it."""

    text: str
    status: int
    shown: list[str]


def blocks_of(document: Path) -> list[Block]:
    found: list[Block] = []
    lines = document.read_text(encoding="utf-8").splitlines()
    said = ""  # the last line of prose
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i] == fence["indent"] + "```")
            text = "".join(f"{line.removeprefix(fence['indent'])}\n" for line in lines[at + 1 : end])
            runs = fence["language"] in EXECUTED and said != "<!-- not run -->"
            found.append(Block(document, at + 1, fence["language"], text, runs))
            at, said = end, ""
        elif lines[at].strip():
            said = lines[at].strip()
        at += 1
    return found


def commands_of(block: Block) -> Iterator[Command]:
    lines = block.text.replace("\\\n", " ").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")] + [len(lines)]
    for start, end in itertools.pairwise(starts):
        text = lines[start].removeprefix("$ ")
        status = _STATUS.search(text)
        yield Command(_STATUS.sub("", text), int(status["status"]) if status else 0, lines[start + 1 : end])


# --- running a document --------------------------------------------------------------------------


class Reader:
    """Does what a reader of one document would do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespace: dict[str, Any] = {"__name__": "document"}
        self.printed = ""

    def read(self, block: Block) -> None:
        if block.language == "python":
            self._python(block)
        elif block.language == "text":
            check_shown(block.text.splitlines(), self.printed, block.place)
        else:
            for command in commands_of(block):
                self._command(command, block.place)

    def _python(self, block: Block) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        named = _FILE.match(block.text.splitlines()[0])
        # A file even where the document names none, so that errors and source lines have somewhere to point.
        path = self.directory / (named["name"] if named else f"{block.document.stem.replace('-', '_')}_{block.line}.py")
        path.write_text(block.text, encoding="utf-8")
        with captured() as heard:
            if named is None:
                exec(compile(block.text, str(path), "exec"), self.namespace)
            elif not path.name.startswith("test_"):
                sys.modules.pop(path.stem, None)
                importlib.invalidate_caches()
                importlib.import_module(path.stem)
        self.printed = heard.getvalue()

    def _command(self, command: Command, place: str) -> None:
        if not _RUNNABLE.match(command.text):
            return
        words = shlex.split(command.text)
        if words[:3] == ["python", "-m", "turbogr_compile"]:
            words = ["turbogr", *words[3:]]
        status, output = _in_process(words[1:]) if words[0] == "turbogr" else self._in_shell(command.text)
        assert status == command.status, f"{place}: `{command.text}` ended with status {status}\n{output}"
        check_shown(command.shown, output, f"{place}: `{command.text}`")

    def _in_shell(self, text: str) -> tuple[int, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        done = subprocess.run(
            text, shell=True, cwd=self.directory, env={**os.environ, "PATH": path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout


def _in_process(arguments: list[str]) -> tuple[int, str]:
    """The command line without the seconds that importing torch takes."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with captured() as heard:
        try:
            status = cli.main(arguments)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return status, heard.getvalue()


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        yield heard


# --- comparing what is shown ---------------------------------------------------------------------


def check_shown(shown: list[str], output: str, place: str) -> None:
    """Each shown line occurs in the output, in this order."""
    lines = iter([plain(line) for line in output.splitlines()])
    for line in shown:
        wanted = plain(line)
        if wanted in ("", "..."):
            continue
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in wanted.split("...")))
        if not any(pattern.fullmatch(found) for found in lines):
            raise AssertionError(f"{place} shows a line that was not printed (here):\n  {line}\nprinted:\n{output}")


def plain(line: str) -> str:
    """The line without what differs from run to run, and without the widths of columns."""
    line = re.sub(r"\b\d+\.\d ms", "0.0 ms", line)
    line = re.sub(r"\b\d\.\de-\d\d\b", "0.0e-00", line)
    return re.sub(r"\s+", " ", re.sub("─+", "─", line)).strip()


# --- tests ---------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """A reader in an empty directory; what they import and register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("TURBOGR_", "TORCH_LOGS", "TORCH_TRACE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TURBOGR_CODEGEN", "aten")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield Reader(tmp_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    files = {name: str(getattr(module, "__file__", None) or "") for name, module in sys.modules.items()}
    mine = {name for name, file in files.items() if file.startswith(str(tmp_path))}
    for name in mine:
        del sys.modules[name]
    for name, known in list(catalogue.PASSES._registered.items()):
        if known.__module__ in mine:
            del catalogue.PASSES._registered[name]
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:turbogr")  # documents show what warnings look like
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_document_does_what_it_shows(document: Path, reader: Reader) -> None:
    for block in blocks_of(document):
        if block.runs:
            try:
                reader.read(block)
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.S)
    for link in _LINK.finditer(prose):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        path = (document.parent / target).resolve() if target else document
        assert path.is_relative_to(ROOT) and path.exists(), f"{document.name} links to {link['target']}"
        if anchor:
            assert anchor in anchors_of(path), f"{document.name} links to {link['target']}: no such heading"


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_every_remark_id_is_explained() -> None:
    said = re.compile(
        r"(?:CannotCapture|_refuse|\.missed|\.applied|\.analysis|RemarkKind\.\w+,)\(?\s*['\"]([a-z-]+)['\"]"
        r"|(?:\w+\.miss|Missed)\([\w.]+, \"([a-z-]+)\""
    )
    sources = [p for folder in ("turbogr_compile", "passes", "lowering") for p in (ROOT / folder).rglob("*.py")]
    ids = {i for p in sources for found in said.findall(p.read_text(encoding="utf-8")) for i in found if i}
    assert {"pass-failed", "not-traceable", "constant-too-large", "pads-attended", "mixes-rows"} <= ids
    explained = (ROOT / "docs" / "inspecting.md").read_text(encoding="utf-8")
    assert not [i for i in sorted(ids) if f"| `{i}` |" not in explained]


def test_what_is_left_out_stays_the_exception() -> None:
    blocks = [b for d in DOCUMENTS for b in blocks_of(d) if b.language in EXECUTED]
    left_out = [b.place for b in blocks if not b.runs]
    assert len(left_out) <= 3, left_out


def test_the_reader_sees_what_is_wrong(tmp_path: Path, reader: Reader) -> None:
    """A document that lies fails: in its output, in its order, in an exit status, in its code."""
    lies = [
        "```python\nprint('one\\ntwo')\n```\n```text\ntwo\none\n```\n",
        "```python\nprint('1')\n```\n```text\n2\n```\n",
        "```console\n$ turbogr doctor   # exit status 1\n```\n",
        "```console\n$ turbogr explain no_such_file.py:fn\n```\n",
        "```python\nassert False\n```\n",
    ]
    for number, text in enumerate(lies):
        document = tmp_path / f"lie{number}.md"
        document.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError):
            for block in blocks_of(document):
                reader.read(block)


def test_the_reference_has_every_public_name_with_its_own_words():
    rows = dict(
        re.findall(r"^\| `(\w+)[^`]*` \| (.*) \|$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    )
    named = set(turbogr_compile.__all__)
    assert named <= rows.keys(), f"not in docs/api.md: {sorted(named - rows.keys())}"
    for name in named:
        words = (inspect.getdoc(getattr(turbogr_compile, name)) or "").splitlines()[0]
        assert rows[name].replace("\\|", "|").startswith(words.rstrip(".")), name
