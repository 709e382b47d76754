"""Architecture rules: which modules may import which, and what commands import at startup.

Imports are read from the source with `ast`, so the rules cover imports inside functions too;
startup is checked by running the commands.
"""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vitcli"


def levels() -> dict[str, set[str]]:
    """The components of each level, parsed from the map in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    found: dict[str, set[str]] = {}
    for level, names in re.findall(r"^\| (\d|any) \| ([^|]+) \|", page, re.MULTILINE):
        found.setdefault(level, set()).update(re.findall(r"`(\w+)[./]", names))
    return found


# Components import from their own level and lower ones; all may import the figures.
LEVELS = levels()
FIGURES = LEVELS.pop("any")
LEVEL_OF = {
    component: int(level) for level, components in LEVELS.items() for component in components
}
# Entry points: the package itself, which imports lazily, and `python -m vitcli`.
ENTRY_POINTS = {"", "__main__"}

# Where torch may be imported; everything else must work without it.
TORCH_COMPONENTS = {
    "models",
    "devices",
    "distributed",
    "metrics",
    "inference",
    "prediction",
    "program",
    "evaluation",
    "inspection",
    "train",
}
TORCH_MODULES = {"data.transforms", "data.loader", "checkpoints.load", "checkpoints.pickles"}
TORCH_MODULES |= {"checkpoints.verify"}

LINES_PER_FILE = 420
LINES_PER_FUNCTION = 80
LONG_FILES = {"layouts.timm", "layouts.transformers"}  # everything about one layout
LONG_FILES |= {"train.config"}  # all options of a training run
LONG_FUNCTIONS = {"train.loop"}  # the training loop


class Import(NamedTuple):
    """The target of an import statement, as an absolute dotted name."""

    name: str
    line: int
    for_types: bool
    """Whether it is under `if TYPE_CHECKING:`, so never executed."""


def modules() -> dict[str, Path]:
    """Files of all modules by name inside vitcli ("" for the package itself)."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
NODES = {name: [*ast.walk(ast.parse(path.read_text("utf-8")))] for name, path in MODULES.items()}
"""All nodes of the syntax tree of each module."""


def component(module: str) -> str:
    """The first part of a module's name: "data.loader" -> "data"."""
    return module.partition(".")[0]


@functools.cache
def imports(module: str) -> list[Import]:
    """All imports of a module, at any depth; relative ones fail the test."""
    typing_only = {
        id(inner)
        for node in NODES[module]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in NODES[module]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not getattr(node, "level", 0), f"{module}:{node.lineno}: import an absolute name"
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = (prefix + alias.name for alias in node.names)
            found += [Import(name, node.lineno, id(node) in typing_only) for name in names]
    return found


def imported_components(module: str) -> Iterator[tuple[str, int]]:
    """The components that a module imports from, with line numbers."""
    for name, line, _ in imports(module):
        if name.startswith("vitcli."):
            yield component(name.removeprefix("vitcli.")), line


def importers(package: str, *, for_types: bool = False) -> dict[str, int]:
    """Modules that import an external package, with a line number each."""
    return {
        module: found.line
        for module in MODULES
        for found in imports(module)
        if found.name.partition(".")[0] == package and (for_types or not found.for_types)
    }


def test_every_component_has_a_level() -> None:
    components = {component(name) for name in MODULES} - ENTRY_POINTS
    assert components == FIGURES | set(LEVEL_OF), (
        "give the component its level in docs/architecture.md"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_respect_levels(module: str) -> None:
    if component(module) in ENTRY_POINTS:
        return
    for other, line in imported_components(module):
        message = f"vitcli.{module}:{line} imports vitcli.{other}"
        if other == "__version__":
            continue
        if component(module) in FIGURES:
            assert other in FIGURES | {"atomic"}, f"{message}, but figures take arrays"
            continue
        if other in FIGURES:
            continue
        assert other in LEVEL_OF, f"{message}, which is no component"
        assert LEVEL_OF[other] <= LEVEL_OF[component(module)], f"{message}, which stands above it"


def test_no_circular_imports() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        names = {i.name.removeprefix("vitcli.") for i in imports(module) if not i.for_types}
        named = names | {name.rpartition(".")[0] for name in names}
        graph[module] = named & (set(MODULES) - {"", module})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_models_and_data_are_independent() -> None:
    for module in MODULES:
        components = {component(module), *(other for other, _ in imported_components(module))}
        assert (
            component(module) not in {"models", "data"} or not {"models", "data"} <= components
        ), module


def test_package_inits_import_no_submodules() -> None:
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    assert "" in packages
    for package in packages:
        run = [i for i in imports(package) if i.name.startswith("vitcli") and not i.for_types]
        assert not run, f"vitcli/{package}/__init__.py imports {run}"


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a module, each with the dotted name of the function."""

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return node.id if isinstance(node, ast.Name) else ""

    return ((dotted(node.func), node) for node in NODES[module] if isinstance(node, ast.Call))


def test_only_cli_prints_or_exits() -> None:
    for outside in ("typer", "rich", "click"):
        talkers = {m for m in importers(outside, for_types=True) if component(m) != "cli"}
        assert not talkers, f"{outside} outside cli/"
    forbidden = {"print", "sys.exit", "exit", "quit", "os._exit", "SystemExit", "input"}
    for module in MODULES:
        if component(module) not in {"cli", "__main__"}:
            found = [(name, node.lineno) for name, node in calls(module) if name in forbidden]
            assert not found, f"vitcli.{module} calls {found}"


def test_only_allowed_modules_import_torch() -> None:
    for module, line in importers("torch").items():
        allowed = component(module) in TORCH_COMPONENTS or module in TORCH_MODULES
        assert allowed, f"vitcli.{module}:{line} imports torch"


def test_only_figures_import_matplotlib() -> None:
    assert {component(module) for module in importers("matplotlib", for_types=True)} == FIGURES


def test_only_registry_reads_package_data() -> None:
    for module, nodes in NODES.items():
        if module == "hub.registry":
            continue
        for node in nodes:
            named = getattr(node, "id", None) or getattr(node, "attr", None)
            assert named not in {"weights_root", "__file__"}, f"vitcli.{module} finds weights/"
        assert not any(i.name.startswith("importlib.resources") for i in imports(module)), module


def test_no_unsafe_unpickling() -> None:
    for outside in ("pickle", "cloudpickle", "dill", "joblib"):
        assert not importers(outside)
    for module in MODULES:
        for name, node in calls(module):
            if name == "torch.load" or name.startswith(("np.", "numpy.")):
                options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                expected = ("True", "False") if name == "torch.load" else (None, "False")
                found = options.get("weights_only"), options.get("allow_pickle", "False")
                assert found == expected, f"{module}:{node.lineno}"


def test_no_vague_names() -> None:
    empty = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
    for module, nodes in NODES.items():
        assert not empty & set(module.split(".")), module
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                assert not re.search(r"(Manager|Factory|Helper|Util)s?$", node.name), node.name


def test_file_and_function_length() -> None:
    for module, path in MODULES.items():
        lines = len(path.read_text("utf-8").splitlines())
        assert lines <= LINES_PER_FILE or module in LONG_FILES, (
            f"vitcli.{module} has {lines} lines: are these two modules?"
        )
        if module in LONG_FUNCTIONS:
            continue
        for node in NODES[module]:
            if isinstance(node, ast.FunctionDef):
                # Only the body: the options of a command take one or more lines each.
                length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
                assert length <= LINES_PER_FUNCTION, f"{module}.{node.name} has {length} lines"


# ---------------------------------------------------------------------------------------------
# Startup


def imported_by(*arguments: str) -> set[str]:
    """Top-level packages that `python ARGUMENTS` imports; the command must succeed."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    pattern = r"^import time:\s*\d+ \|\s*\d+ \|\s*([\w.]+)$"
    names = re.findall(pattern, run.stderr, re.MULTILINE)
    assert run.returncode == 0, re.sub(r"^import time:.*\n", "", run.stderr, flags=re.MULTILINE)
    assert "vitcli" in names, "the output of -X importtime was not understood"
    return {name.partition(".")[0] for name in names}


SLOW_TO_IMPORT = {"torch", "numpy", "rich", "huggingface_hub", "PIL", "matplotlib", "safetensors"}
TIMM = "tests/golden/timm_vit_default"
HELP = """
from vitcli.cli.main import COMMANDS, app
for command in ([], *([name] for name in COMMANDS)):
    app([*command, "--help"], standalone_mode=False)
"""


@pytest.mark.parametrize(
    "code",
    [
        HELP,
        "import vitcli; dir(vitcli); vitcli.__version__",
        f"from vitcli.checkpoints.read import read_info; read_info({TIMM!r})",
    ],
)
def test_help_and_api_are_lightweight(code: str) -> None:
    assert not imported_by("-c", code) & SLOW_TO_IMPORT


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "info default",
        "info default --json",
        "pull default",
        f"resize-posemb {TIMM} --grid 5 --output OUT",
        f"convert {TIMM} OUT",
        "convert tests/golden/vit_jax_token/checkpoint.npz OUT",
        "models",
        "models --json",
        "models show vit-b16-i21k",
    ],
)
def test_commands_without_torch(command: str, tmp_path: Path) -> None:
    args = [arg.replace("OUT", str(tmp_path / "out")) for arg in command.split()]
    forbidden = SLOW_TO_IMPORT - {"rich"} if args[0] == "models" else {"torch", "matplotlib"}
    assert not imported_by("-m", "vitcli", *args) & forbidden
