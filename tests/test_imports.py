"""The dependency rule, the import without heavy packages, and the public surface."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import turboquant

PACKAGE = Path(turboquant.__file__).parent
ROOT = PACKAGE.parent
# Lower layers never import higher ones; modules of one layer may know each other, without cycles.
LAYERS = [
    ("checks",),
    ("packing", "rotation", "rotary", "codebook", "page", "config"),
    ("quantizer",),
    ("codec",),
    ("batch", "store", "calibration"),
    ("capture",),
    ("score",),
    ("kernels", "kv_cache"),
    ("integration",),
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
ENTRY_POINT = len(LAYERS)  # programs and re-exports: they may import everything, and no layer imports them
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def layer_of(relative):
    return relative.parts[0].removesuffix(".py")


def imported_modules(path):
    """Absolute names of everything that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            assert all(isinstance(arg, ast.Constant | ast.Subscript) for arg in node.args)


def own_imports(path):
    """First components below `turboquant` that a file imports."""
    names = (name.split(".") for name in imported_modules(path))
    return {parts[1] for parts in names if parts[0] == "turboquant" and len(parts) > 1 and is_module(parts[1])}


def is_module(name):
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


@pytest.mark.parametrize("relative", FILES, ids=str)
def test_lower_layers_do_not_import_higher_ones(relative):
    rank = RANK.get(layer_of(relative), ENTRY_POINT)
    higher = {name for name in own_imports(PACKAGE / relative) if RANK.get(name, ENTRY_POINT) > rank}
    assert not higher


@pytest.mark.parametrize("relative", FILES, ids=str)
def test_heavy_packages_stay_in_their_folders(relative):
    roots = {name.split(".")[0] for name in imported_modules(PACKAGE / relative)}
    assert "vllm" not in roots or relative.parts[0] == "integration"
    assert "triton" not in roots or relative.parts[0] == "kernels"
    if layer_of(relative) in RANK and relative.parts[0] not in ("integration", "kernels"):
        assert roots <= {"turboquant", "torch", "numpy"} | set(sys.stdlib_module_names)


def test_rule_sees_what_it_should():
    """The test can fail: the layers exist and import each other downwards, and the integration imports vllm."""
    assert all(is_module(name) for name in RANK if name != "kernels")
    assert {"config", "page", "quantizer", "rotation"} <= own_imports(PACKAGE / "codec.py")
    assert {"batch", "store"} <= own_imports(PACKAGE / "capture.py")
    vllm = [f for f in FILES if "vllm" in {n.split(".")[0] for n in imported_modules(PACKAGE / f)}]
    assert vllm and all(f.parts[0] == "integration" for f in vllm)


def test_no_import_cycles():
    graph = {}
    for relative in FILES:
        if relative.name != "__init__.py":
            graph.setdefault(layer_of(relative), set()).update(own_imports(PACKAGE / relative) - {layer_of(relative)})
    done = set()
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(graph), f"cycle among {sorted(set(graph) - done)}"


BLOCKED_IMPORT = """
import importlib, sys
blocked = ("vllm", "triton", "scipy", "transformers")
sys.modules.update(dict.fromkeys(blocked))  # None: any import raises ImportError
import turboquant
loaded = [name for name in sys.modules if name.startswith("turboquant.integration")]
assert not loaded, loaded
assert "torch" in sys.modules
for name in turboquant.__all__:
    assert getattr(turboquant, name) is not None, name
for name in ("batch", "capture", "kv_cache", "score", "store"):
    importlib.import_module(f"turboquant.{name}")
assert all(sys.modules[name] is None for name in blocked)
print(turboquant.__version__, len(turboquant.__all__))
"""


def test_import_and_public_names_without_heavy_packages():
    """Torch and numpy suffice; every public name resolves, the hooks' too; importing has no side effects on others."""
    done = subprocess.run([sys.executable, "-c", BLOCKED_IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [turboquant.__version__, str(len(turboquant.__all__))]


def test_public_names():
    assert len(set(turboquant.__all__)) == len(turboquant.__all__)
    assert {"TurboQuantConfig", "TurboQuantKVCache", "install_turboquant_hooks", "set_mode"} <= set(turboquant.__all__)
    with pytest.raises(AttributeError, match="'turboquant' has no attribute 'nothing'"):
        _ = turboquant.nothing


def test_one_version():
    declared = re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text())
    assert declared and declared.group(1) == turboquant.__version__
