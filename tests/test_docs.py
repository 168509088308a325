"""What the documentation says is so: examples run, and commands, options, names, paths and links exist.

The examples of README.md, those of docs/cuda.md about debugging and those of docs/distributed.md have tests
beside the tests of what they show; all others run here.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import gpunet
from gpunet.bench.report import BEGIN, END
from gpunet.cli import COMMANDS, main
from gpunet.cuda_kernels.sim import toolchain
from gpunet.data import load_digits
from gpunet.optimizers import SGD

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/*.md")
)
BY_NAME = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
WIDTH = 120


@dataclass
class Block:
    """A code block: what stands behind its fence, its text, and the expected output behind it."""

    language: str
    code: str
    output: str = ""


def blocks(text: str) -> list[Block]:
    """All fenced and indented code blocks, in order."""
    found: list[Block] = []
    for language, fenced, indented in re.findall(
        r"^```(\w*)\n(.*?)^```$|^\n((?:    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL
    ):
        if language == "text" and found:
            found[-1].output = fenced
        else:
            found.append(Block(language, fenced or re.sub("^    ", "", indented, flags=re.MULTILINE)))
    return found


def prose(text: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """The code spans of a page, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


# ---- examples


def programs(page: str) -> list[list[Block]]:
    """The Python blocks of a page: one that begins without an import goes on with the program before it."""
    found: list[list[Block]] = []
    for block in blocks(BY_NAME[page]):
        if block.language == "python":
            if block.code.startswith(("import ", "from ")) or not found:
                found.append([])
            found[-1].append(block)
    return found


def is_run_here(page: str, program: list[Block]) -> bool:
    if page in ("README.md", "docs/distributed.md"):
        return False
    # Kernels that do something wrong are programs of tests/test_sim_toolchain.py.
    section = BY_NAME[page].split("## How kernels are compiled")[0]
    return page != "docs/cuda.md" or program[0].code not in section


def is_excerpt(block: Block) -> bool:
    """Whether it shows lines of an example, which has a test of its own."""
    lines = block.code.splitlines()
    return any(set(lines) <= set(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLE_FILES)


EXAMPLE_FILES = sorted(ROOT.glob("examples/*.py"))
EXAMPLES = [
    pytest.param(page, program, id=f"{Path(page).stem}-{number}")
    for page in BY_NAME
    for number, program in enumerate(programs(page))
    if is_run_here(page, program)
]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the pages say that there is: a workspace with a net, a saved model in FOLDER, images."""
    monkeypatch.chdir(tmp_path)
    model = gpunet.Model("net")
    data, label = model.input("data", (4, 1, 8, 8)), model.input("label", (4,), "int32")
    softmax, loss = model.softmax_with_loss(model.fc(data, "fc", 10), label)
    model.add_gradients(loss)
    SGD(0.1).apply(model)
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    images, labels = (part[:4] for part in load_digits("train"))
    workspace.feed(data, images)
    workspace.feed(label, labels)
    workspace.create(model.net)
    gpunet.save_model("FOLDER", model, workspace, softmax)
    return {"gpunet": gpunet, "workspace": workspace, "images": images}


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize(("page", "program"), EXAMPLES)
def test_examples_run(
    page: str, program: list[Block], names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = "".join(block.code for block in program)
    if "nvrtc" in whole and importlib.util.find_spec("cupy") is None:
        pytest.skip("NVRTC comes with the extra cuda12 or cuda13")
    if "sim:" in whole and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    for block in program:
        if is_excerpt(block):
            continue
        exec(compile(block.code, page, "exec"), names)
        printed = capsys.readouterr().out
        assert not block.output or printed == block.output


def test_each_page_has_its_examples_run() -> None:
    pages = {example.values[0] for example in EXAMPLES}
    assert pages == {"docs/caffe2.md", "docs/cuda.md", "docs/seeing.md"}
    assert len(EXAMPLES) >= 7


# ---- commands and options


def option_names(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def command_of(name: str) -> click.Command:
    assert name in COMMANDS, f"there is no command {name!r}"
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def uses(text: str) -> Iterator[list[str]]:
    """The words behind each ``gpunet`` in a line of a shell."""
    words = shlex.split(text, comments=True)
    for position, word in enumerate(words):
        if word == "gpunet" and position + 1 < len(words):
            yield words[position + 1 :]


def shell_lines() -> Iterator[tuple[str, str]]:
    for page, text in BY_NAME.items():
        for block in blocks(text):
            if block.language in ("", "sh"):
                for line in block.code.splitlines():
                    if re.search(r"(^|[/ ])gpunet \w", line) and not line.startswith(("gpunet:", "error:")):
                        yield page, line.replace(".venv/bin/", "")


def test_commands_in_blocks_are_complete() -> None:
    lines = list(shell_lines())
    assert len(lines) > 15
    for page, line in lines:
        for name, *arguments in uses(line):
            try:
                command_of(name).make_context(name, arguments)
            except click.ClickException as error:
                pytest.fail(f"{page}: {line!r}: {error.format_message()}")


@pytest.mark.parametrize("page", BY_NAME)
def test_commands_in_the_text_exist_and_have_these_options(page: str) -> None:
    for span in spans(BY_NAME[page]):
        if "'" in span or not re.match(r"(mpirun .*|srun .*)?gpunet [a-z]", span):
            continue
        for name, *arguments in uses(span):
            command = command_of(name)
            given = {word.split("=")[0] for word in arguments if word.startswith("--") and len(word) > 2}
            if name != "launch":
                assert given <= option_names(command), f"{page}: {span}"


#: Options of other programs.
OTHERS = {"--bind-to", "--fmad", "--mpi", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--signal"}


@pytest.mark.parametrize("page", BY_NAME)
def test_options_exist(page: str) -> None:
    folders = ("gpunet", "bench", "proto", "distributed")
    sources = [
        path.read_text(encoding="utf-8") for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    sources.append((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    known = set(re.findall(r"--[a-z][a-z-]+", "\n".join(sources))) | OTHERS
    found = {option for span in spans(BY_NAME[page]) for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", span)}
    assert found - known == set()


# ---- names, paths, links


@pytest.mark.parametrize("page", BY_NAME)
def test_dotted_names_exist(page: str) -> None:
    for span in spans(BY_NAME[page]):
        match = re.match(r"gpunet(\.\w+)+", span)
        if match is None or match.group().endswith((".proto", ".cu", ".cuh")):
            continue
        try:
            pkgutil.resolve_name(match.group())
        except (ImportError, AttributeError):
            pytest.fail(f"{page}: there is no {match.group()}")


def renamed() -> list[str]:
    """What docs/caffe2.md says that Caffe2's names are called here."""
    section = BY_NAME["docs/caffe2.md"].split("\n## Names\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `.*?\| (.*) \|$", section, re.MULTILINE)
    return [span for row in rows for span in re.findall("`(.*?)`", row)]


def test_the_names_for_users_of_caffe2_exist() -> None:
    objects = {"ws": gpunet.Workspace("cpu"), "net": gpunet.Net("n"), "model": gpunet.Model("m")}
    checked = 0
    for span in renamed():
        owner, _, name = span.partition(".")
        if owner in objects:
            assert hasattr(objects[owner], name), span
            checked += 1
    assert checked > 30


FOLDERS = "gpunet|cpu_fallback|cuda_kernels|distributed|bench|tests|docs|examples|proto|tools"


@pytest.mark.parametrize("page", BY_NAME)
def test_paths_and_links_lead_somewhere(page: str) -> None:
    text = BY_NAME[page]
    for span in spans(text):
        if re.fullmatch(rf"({FOLDERS})/[\w./-]*", span) and not re.search("[A-Z]{3}", span):
            assert (ROOT / span).exists(), span
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", prose(place.read_text(encoding="utf-8")), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, target


def test_variables_of_the_environment_are_those_of_the_code() -> None:
    folders = ("gpunet", "cpu_fallback", "cuda_kernels", "distributed")
    sources = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
    code = "\n".join(p.read_text(encoding="utf-8") for p in sources if p.suffix in (".py", ".cuh", ".h"))
    told = {name for text in BY_NAME.values() for name in re.findall(r"`(GPUNET_[A-Z0-9_]+)", text)}
    assert told <= set(re.findall(r"GPUNET_[A-Z0-9_]+", code))
    read = set(re.findall(r'"(GPUNET_[A-Z0-9_]+)"', code))
    assert len(read) > 15
    assert read <= told


# ---- form


@pytest.mark.parametrize("page", BY_NAME)
def test_lines_of_prose_are_not_too_long(page: str) -> None:
    # What the benchmarks write into their page is as wide as it is.
    text = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", "", BY_NAME[page], flags=re.DOTALL)
    lines = prose(text).splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith(("|", "    "))] == []
    assert [line for line in lines if line != line.rstrip()] == []
