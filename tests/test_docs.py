"""The documentation: links resolve, commands and code are accepted by the parsers and signatures they are meant for,
messages are the package's own, tables are what the package and the result files say."""

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import typer

from turboquant.cli import app
from turboquant.config import TurboQuantConfig

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "examples/README.md", ROOT / "tests/cases/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PROGRAMS = "python3?|pip|vllm|curl|docker|ruff|lm_eval|chromium"
COMMAND = re.compile(rf"(?:[A-Z_]+=(?:'[^']*'|\S+) )*(?:turboquant (?!\w+:)|(?:{PROGRAMS}) )")
OTHER_LINES = re.compile(r"grep |mypy$|\. \.venv/bin/activate$")  # of blocks: nothing in them could be wrong
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
sys.path.insert(0, str(ROOT / "docs"))
UsageError = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError"
)  # Click's, or Typer's own


def text_of(page):
    return page.read_text(encoding="utf-8")


def prose_of(page):
    """A page without its code blocks."""
    return FENCE.sub("", text_of(page))


# ---- links -----------------------------------------------------------------------------------------------------
def anchor(heading):
    """GitHub's name for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def anchors(page):
    return {anchor(line) for line in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)}


def broken(page, target):
    """Why a link does not resolve, or None."""
    path, _, place = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    if not found.exists():
        return f"{target}: no such file"
    if place and place not in anchors(found):
        return f"{target}: no such heading; there are {sorted(anchors(found))}"
    return None


@names
def test_links_resolve(page):
    targets = [target for target in LINK.findall(prose_of(page)) if "://" not in target]
    assert [said for target in targets if (said := broken(page, target))] == []


def test_every_page_is_in_the_reading_order():
    linked = set(LINK.findall(text_of(ROOT / "docs/README.md")))
    assert {page.name for page in DOCS} - {"README.md"} <= linked


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A heading\n")
    assert broken(page, "#a-heading") is None
    assert "no such heading" in broken(page, "#another") and "no such file" in broken(page, "other.md")


# ---- commands --------------------------------------------------------------------------------------------------
def parts_of(line):
    """Commands of a line, without its comment."""
    return [part.strip() for part in re.split(r"&&|(?<!')\|(?!')", re.split(r"(?:^|\s+)# ", line)[0]) if part.strip()]


def lines_of_blocks(page):
    """Lines of code blocks for a shell, with those that are continued joined."""
    blocks = [body for language, body in FENCE.findall(text_of(page)) if language == "bash"]
    return [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]


def commands_of(page):
    """Every command of code blocks and of code in the text."""
    quoted = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose_of(page))]
    parts = [part for line in [*lines_of_blocks(page), *quoted] for part in parts_of(line)]
    return [part for part in parts if COMMAND.match(part)]


@names
def test_blocks_hold_commands_that_are_checked(page):
    parts = [part for line in lines_of_blocks(page) for part in parts_of(line)]
    assert [part for part in parts if not (COMMAND.match(part) or OTHER_LINES.match(part))] == []


def variables_of(words):
    """Leading NAME=VALUE words, and the others."""
    pairs = {}
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        pairs[name] = value
    return pairs, words


def options_of(words):
    return [word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]


def check_variables(pairs):
    if preset := pairs.get("TURBOQUANT"):
        TurboQuantConfig.from_options(
            preset if preset != "..." else None, **json.loads(pairs.get("TURBOQUANT_OPTIONS", "{}"))
        )


def check_turboquant(words):
    """Typer's own parser, without running anything."""
    command, name = typer.main.get_command(app), "turboquant"
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"{name} has no command {words[0]}"
        command, name, words = command.commands[words[0]], words[0], words[1:]
    if words or not any(p.param_type_name == "argument" and p.required for p in command.params):
        command.make_context(name, [word if word != "..." else "x" for word in words])


def check_python(words):
    """The script or module is there, and its own parser takes the arguments; those without one take none."""
    if words[:2] == ["-m", "venv"]:
        return
    if words[:2] == ["-m", "pytest"]:
        for word in words[2:]:
            assert word.startswith("-") or (ROOT / word.split("::")[0]).exists(), f"{word} does not exist"
        return
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec, f"there is no module {words[1]}"
        if not words[1].startswith("turboquant"):
            return
        path, words = Path(spec.origin), words[2:]
    else:
        path, words = ROOT / words[0], words[1:]
    assert path.exists(), f"{path} does not exist"
    if "import argparse" in path.read_text():
        parse_with_own_parser(path, words)
    else:
        assert not words, f"{path.name} takes no arguments"


class Parsed(Exception):
    """Arguments were accepted; nothing else is to happen."""


def parse_with_own_parser(path, words):
    """Run a script up to its parser."""
    own, said = argparse.ArgumentParser.parse_args, io.StringIO()

    def parse(parser, args=None, namespace=None):
        own(parser, args, namespace)
        raise Parsed

    script = [str(path), *words]
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(sys, "argv", script), mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        mock.patch.dict(os.environ), contextlib.redirect_stderr(said),
    ):  # fmt: skip
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Parsed:
            return
        except SystemExit:
            raise AssertionError(said.getvalue()) from None
        except ModuleNotFoundError as error:
            pytest.skip(f"{error.name} is not installed")
    raise AssertionError(f"{path.name} did not parse its arguments")


@cache
def vllms_options():
    pytest.importorskip("vllm")
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # 0.32; 0.26
    make_arg_parser = importlib.import_module(next(p for p in places if importlib.util.find_spec(p))).make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return {option for action in make_arg_parser(FlexibleArgumentParser())._actions for option in action.option_strings}


def check_command(text):
    pairs, words = variables_of(shlex.split(text.replace("...", "x") if text.endswith("...") else text))
    check_variables(pairs)
    program, *rest = words
    if program == "turboquant":
        check_turboquant(rest)
        if rest[:1] == ["serve"]:
            rest = [w for w in rest if w not in ("--preset", "--option", "--dry-run")]
            assert set(options_of(rest)) <= vllms_options()
    elif program.startswith("python"):
        check_python(rest)
    elif program == "vllm":
        assert rest[0] == "serve" and set(options_of(rest)) <= vllms_options()
    elif program == "pip":
        extras = {extra for word in rest for found in re.findall(r"\[(.*?)\]", word) for extra in found.split(",")}
        assert all(f'"{extra}":' in (ROOT / "setup.py").read_text() for extra in extras)


COMMANDS = [(page, command) for page in PAGES for command in dict.fromkeys(commands_of(page))]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command[:60] for _, command in COMMANDS])
def test_commands_parse(page, command):
    check_command(command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("turboquant plam MODEL", "no command plam"),
        ("turboquant plan MODEL --gpu-memori 24GiB", "gpu-memori"),
        ("turboquant verify MODEL --htm page", "--htm"),
        ("python nothing.py", "does not exist"),
        ("python benchmark.py engine --plott x", "--plott"),
        ("python -m turboquant.codebook --outt x", "--outt"),
        ("python proof.py --preset k4v5", "k4v5"),
        ("python docs/make.py now", "takes no arguments"),
        ("python -m pytest tests/test_nothing.py", "does not exist"),
        ("TURBOQUANT=k4v5 vllm serve MODEL", "k4v5"),
        ("TURBOQUANT=k4v4 TURBOQUANT_OPTIONS='{\"bufer_size\": 4}' vllm serve MODEL", "bufer_size"),
    ],
)
def test_wrong_commands_are_seen(command, said):
    with pytest.raises((AssertionError, UsageError, ValueError)) as error:
        check_command(command)
    assert said in str(getattr(error.value, "message", error.value))


# ---- code ------------------------------------------------------------------------------------------------------
BLOCKS = [(page, body) for page in PAGES for language, body in FENCE.findall(text_of(page)) if language == "python"]


def check_code(text):
    """It compiles, what it imports exists, and its calls of the package fit the signatures."""
    found = {"turboquant": __import__("turboquant")}
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "<docs>", "exec"), found)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).split(".")[0] in found:
            called = eval(ast.unparse(call.func), found)
            names = [keyword.arg for keyword in call.keywords if keyword.arg]
            inspect.signature(called).bind(*call.args, **dict.fromkeys(names))


@pytest.mark.parametrize(("page", "text"), BLOCKS, ids=[page.name for page, _ in BLOCKS])
def test_code_fits_the_package(page, text):
    for package in ("vllm", "transformers"):
        if package in text:
            pytest.importorskip(package)
    check_code(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import turboquant.nothing", ImportError),
        ("turboquant.atach(llm)", AttributeError),
        ("turboquant.calibrate(llm, paths='x')", TypeError),
        ("llm = LLM(", SyntaxError),
    ],
)
def test_wrong_code_is_seen(text, error):
    with pytest.raises(error):
        check_code(text)


# ---- transcript ------------------------------------------------------------------------------------------------
def test_the_quick_start_is_run():
    """`.ci/run` calls docs/transcript.py, which runs these; tests/test_readme.py."""
    import transcript

    found = transcript.commands(text_of(ROOT / "docs/quickstart.md"))
    wanted = ("turboquant doctor", "turboquant plan", "turboquant verify", "turboquant serve", "python", "curl")
    assert [command.startswith(start) for (_, command), start in zip(found, wanted, strict=True)] == [True] * 6
    assert [kind for kind, _ in found] == ["run", "run", "run", "serve", "run", "run"]


def test_a_command_that_fails_ends_the_transcript(tmp_path):
    import transcript

    page = tmp_path / "page.md"
    page.write_text("<!-- run -->\n```bash\ntrue\nfalse | cat\ntouch never\n```\n")
    with (
        mock.patch.object(sys, "argv", ["transcript.py", str(page)]), mock.patch.object(transcript, "ROOT", tmp_path),
        mock.patch.object(transcript, "smollm2", lambda: tmp_path), mock.patch.dict(os.environ),
        pytest.raises(SystemExit, match=r"false \| cat"),
    ):  # fmt: skip
        transcript.main()
    assert not (tmp_path / "never").exists()


# ---- messages --------------------------------------------------------------------------------------------------
@cache
def strings():
    """All texts of the package; what is put into one is left out."""
    found = []
    for path in (ROOT / "turboquant").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("\0".join(p.value for p in node.values if isinstance(p, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


QUOTED = re.findall(r"^> (.+)$", text_of(ROOT / "docs/troubleshooting.md"), re.MULTILINE)


@pytest.mark.parametrize("message", QUOTED)
def test_messages_are_the_packages_own(message):
    parts = [part.strip() for part in message.split("...") if len(part.strip()) > 2]
    whole = [text for text in strings() if all(part in text for part in parts)]
    assert whole or message.startswith("unknown "), f"no text of the package has {parts}"


def test_messages_of_choices_are_built_as_quoted():
    with pytest.raises(ValueError, match=r"unknown preset 'k4v44'; allowed: .*; did you mean 'k4v4'\?"):
        TurboQuantConfig.from_options("k4v44")


# ---- tables ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_tables_are_what_the_script_makes(page):
    pytest.importorskip("vllm")
    import make

    assert make.with_tables(text_of(page)) == text_of(page)


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    import make

    for name, draw in make.DRAWN.items():
        draw(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in make.PICTURES.iterdir()} == {*make.DRAWN, "report.png"}


def test_stock_turboquant_has_the_bytes_that_are_named():
    """The installed vLLM's own sizes; its fp8 and int4 caches have no such class to ask."""
    stock = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.config").TurboQuantConfig
    import make

    named = {name.strip("`"): sizes for name, sizes in make.STOCK_BYTES.items() if "turboquant" in name}
    for name, sizes in named.items():
        assert tuple(stock.from_cache_dtype(name, dim).slot_size_aligned for dim in make.HEAD_SIZES) == sizes
    assert len(named) == 4


def test_every_table_has_a_place():
    import make

    marked = [name for page in PAGES for name in re.findall(r"<!-- table: (\w+) -->", text_of(page))]
    assert set(make.TABLES) <= set(marked)


def test_tables_that_nothing_makes_are_empty():
    import make

    found = [x for page in PAGES for x in re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end", text_of(page), re.DOTALL)]
    assert [name for name, text in found if text and name not in make.TABLES] == []
