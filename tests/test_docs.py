"""The documentation: links resolve, commands exist with the options that are quoted, messages are the package's own,
tables are what the package and the result files say."""

import ast
import importlib.util
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from turboquant.cli import app
from turboquant.config import TurboQuantConfig

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "examples/README.md", ROOT / "tests/cases/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:turboquant (?!\w+:)|(?:python|pip|vllm|curl|docker|ruff|lm_eval|mypy) )")
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
def commands_of(page):
    """Every command of code blocks and of code in the text, with lines that are continued joined."""
    blocks = [body for language, body in FENCE.findall(text_of(page)) if language == "bash"]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose_of(page))]
    parts = [
        part.strip() for line in lines for part in re.split(r"&&|(?<!')\|(?!')", line.split("  #")[0].split(" # ")[0])
    ]
    return [part for part in parts if COMMAND.match(part)]


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
    """The script or module is there, and its source has the options."""
    if words[:2] == ["-m", "pytest"]:
        for word in words[2:]:
            assert word.startswith("-") or (ROOT / word.split("::")[0]).exists(), f"{word} does not exist"
        return
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert words[1] == "venv" or spec, f"there is no module {words[1]}"
        path = Path(spec.origin)
    else:
        path = ROOT / words[0]
    assert path.exists(), f"{path} does not exist"
    missing = [option for option in options_of(words[1:]) if f'"{option}"' not in path.read_text()]
    assert not missing or "venv" in words, f"{words[0]} has no option {missing}"


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
        assert all(f'"{extra}": [' in (ROOT / "setup.py").read_text() for extra in extras)


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
        ("python -m pytest tests/test_nothing.py", "does not exist"),
        ("TURBOQUANT=k4v5 vllm serve MODEL", "k4v5"),
        ("TURBOQUANT=k4v4 TURBOQUANT_OPTIONS='{\"bufer_size\": 4}' vllm serve MODEL", "bufer_size"),
    ],
)
def test_wrong_commands_are_seen(command, said):
    with pytest.raises((AssertionError, UsageError, ValueError)) as error:
        check_command(command)
    assert said in str(getattr(error.value, "message", error.value))


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
    assert {path.name for path in make.PICTURES.iterdir()} == set(make.DRAWN)
