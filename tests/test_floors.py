"""The house keeps its shape: who may import whom, who may load torch, who may read the environment.

docs/architecture.md explains the table; this file enforces it on the source as it is written, not on what happens to
run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest
from attrs import frozen

from module_state import mutable_state

PACKAGE: Final = "paged_sdk"
SOURCE: Final = Path(__file__).parents[1] / "src" / PACKAGE


# Imports within a floor: a request holds its SamplingParams, a runner samples, and who proposes drafts reads sequences.
# What goes over wires is what the public names are, the command line runs the server, and replicas are models, as are
# models of engines elsewhere.
WITHIN_A_FLOOR: Final = frozenset(
    {
        ("types", "config"),
        ("runner", "sampling"),
        ("speculative", "scheduler"),
        ("wire", "the public API"),
        ("cli", "server"),
        ("cli", "ray"),
        ("ray", "server"),
        ("routing", "the async API"),
        ("remote", "the async API"),
        ("routing", "remote"),
    }
)


class Pillar(Enum):
    """Names the two halves of floors 2 and 3, which meet in the runner."""

    PURE = "pure"
    TENSOR = "tensor"


@frozen
class Unit:
    """Describes what may import itself freely: a package, or a floor of single modules.

    :ivar name: for messages
    """

    name: str
    floor: int
    pillar: Pillar | None = None

    def may_import(self, other: Unit) -> bool:
        """Return whether the other is this unit or on a floor below, and not in the other pillar."""
        if self == other or (self.name, other.name) in WITHIN_A_FLOOR:
            return True
        crosses = self.pillar is not None and other.pillar is not None and self.pillar is not other.pillar
        return other.floor < self.floor and not crosses


def _units() -> Mapping[str, Unit]:
    """Map the first part of a module's path below the package to its unit."""
    ground = Unit("the ground", 0)
    async_api = Unit("the async API", 8)
    packages = {
        "config": Unit("config", 1),
        "types": Unit("types", 1),
        "kernels": Unit("kernels", 1, Pillar.TENSOR),
        "kv": Unit("kv", 2, Pillar.PURE),
        "chat": Unit("chat", 2, Pillar.PURE),
        "constraints": Unit("constraints", 2, Pillar.PURE),
        "layers": Unit("layers", 2, Pillar.TENSOR),
        "attention": Unit("attention", 2, Pillar.TENSOR),
        "quant": Unit("quant", 2, Pillar.TENSOR),
        "weights": Unit("weights", 2, Pillar.TENSOR),
        "parallel": Unit("parallel", 2, Pillar.TENSOR),
        "scheduler": Unit("scheduler", 3, Pillar.PURE),
        "speculative": Unit("speculative", 3, Pillar.PURE),
        "models": Unit("models", 3, Pillar.TENSOR),
        "adapters": Unit("adapters", 3, Pillar.TENSOR),
        "vision": Unit("vision", 3, Pillar.TENSOR),
        "sampling": Unit("sampling", 4),
        "runner": Unit("runner", 4),
        "engine": Unit("engine", 5),
        "worker": Unit("worker", 6),
        "build": Unit("build", 7),
        "routing": Unit("routing", 8),
        "remote": Unit("remote", 8),
        "wire": Unit("wire", 8),
        "cli": (cli := Unit("cli", 9)),
        "__main__": cli,
        "server": Unit("server", 9),
        "ray": Unit("ray", 9),
        "mistralrs": Unit("mistralrs", 9),
        "testing": Unit("testing", 9),
    }
    async_modules = (
        "calls",
        "model",
        "model_facts",
        "model_insides",
        "builders",
        "composed_builders",
        "building",
        "opening",
        "streaming",
        "blocking",
        "blocking_loop",
        "blocking_stream",
        "blocking_conversation",
        "blocking_pin",
        "conversation",
        "saved_conversation",
    )
    grounds = ("system", "errors", "guard", "logs")
    return packages | dict.fromkeys(grounds, ground) | dict.fromkeys(async_modules, async_api)


UNITS: Final = _units()
# The package's own __init__ exports the public names: whoever imports from it stands above the whole API.
PUBLIC_API: Final = Unit("the public API", 8)


STATE_OF_THE_PROCESS: Final = {
    "config/env.py: os": "how NCCL deals with errors is said to torch by the environment alone, for a moment",
    "build/device_setup.py: _ONE_AT_A_TIME": "a device is one per process, and the driver knows no smaller unit",
    "cli/__init__.py: sys": "the program's standard streams, which it may have been started without",
    "constraints/compiler.py: _STACK_LOCK": "how large the stacks of new threads are is said once per process",
    "kernels/__init__.py: globals()": "public names, found when they are first used",
    "kernels/fallback.py: log_fallback": "the log says it once",
    "kernels/native/library.py: _open": "a shared library is loaded once per process",
    "kernels/native/library.py: available_levels": "what the processor can run stays the same",
    "kernels/native/library.py: load": "the loaded library, which nothing changes",
    "kernels/paged_attention_layer.py: _fastest_prefill": "timings: a user's layers have no object in common",
    "kernels/torch_threads.py: _ONE_AT_A_TIME": "torch has one number for threads that it has not met, per process",
    "kernels/triton/availability.py: num_multiprocessors": "a property of the device",
    "kernels/triton/availability.py: why_not": "a property of the device",
    "kernels/triton/kv_cache.py: _address_table": "a function of addresses alone; a CUDA graph cannot record its copy",
    "kernels/triton/paged_batch.py: _decoder": "a property of the device",
    "runner/cuda_graph.py: _stream_of_trials": "cuBLAS keeps 32 MiB for each stream that multiplies, for good",
}
"""What modules may keep all the same, and why. It depends on no model, and is the same whichever engine asks."""


@frozen
class Module:
    """Holds one source file.

    :ivar path: relative to the package
    """

    path: Path
    tree: ast.Module

    @property
    def unit(self) -> Unit:
        return UNITS[self.path.parts[0].removesuffix(".py")]

    @property
    def name(self) -> str:
        """Return the name by which the module is imported."""
        parts = (PACKAGE, *self.path.with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules() -> list[Module]:
    paths = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
    return [Module(path, ast.parse((SOURCE / path).read_text(encoding="utf-8"))) for path in paths]


MODULES: Final = [module for module in _modules() if module.path != Path("__init__.py")]


def imported_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Return every imported module with its line, wherever the import stands: in functions and under TYPE_CHECKING too.

    ``from a import b`` gives both ``a`` and ``a.b``, for only running it would tell whether ``b`` is a module.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {node.lineno}: relative imports hide which floor they reach"
                assert module is not None
                yield module, node.lineno
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in names)


def imported_units(tree: ast.Module) -> Iterator[tuple[Unit, int]]:
    """Return the units of this package that a module imports, with the line."""
    for name, line in imported_names(tree):
        top, *rest = name.split(".")
        if top != PACKAGE:
            continue
        # `from paged_sdk import config` names a package, `from paged_sdk import Model` an exported object.
        unit = UNITS.get(rest[0], PUBLIC_API) if rest else None
        if unit is not None:
            yield unit, line


def reads_of_the_environment(tree: ast.Module) -> Iterator[int]:
    """Return the lines that read the process's environment variables."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in names:
                yield node.lineno
            case ast.ImportFrom(module="os", names=aliases) if any(alias.name in names for alias in aliases):
                yield node.lineno


def is_without_torch(unit: Unit) -> bool:
    """Return whether a unit is in the pure pillar, or what both pillars stand on."""
    return unit.pillar is Pillar.PURE or (unit.floor <= 1 and unit.pillar is None)


def test_every_module_has_its_floor() -> None:
    homeless = {module.path.parts[0] for module in MODULES if module.path.parts[0].removesuffix(".py") not in UNITS}
    assert not homeless, "new on the ground plan: give it a floor here and in docs/architecture.md"


def test_the_ground_plan_is_drawn_in_the_docs() -> None:
    drawn = (SOURCE.parents[1] / "docs" / "architecture.md").read_text().partition("## Floors")[2].split("```")[1]
    assert set(re.findall(r"(\w+)(?:\.py|/)", drawn)) == set(UNITS)


def test_modules_import_only_what_lies_below() -> None:
    violations = {
        f"{module.path}:{line}: {module.unit.name} (floor {module.unit.floor}) imports {unit.name} (floor {unit.floor})"
        for module in MODULES
        # Errors may name, for type checkers alone, the responses that they carry.
        if module.path != Path("errors.py")
        for unit, line in imported_units(module.tree)
        if not module.unit.may_import(unit)
    }
    assert not violations, "\n".join(sorted(violations))


def test_no_two_modules_need_each_other() -> None:
    """What both sides of a dispatch know lies in a third module. The error names the circle."""
    trees = {module.name: module.tree for module in MODULES if module.path.name != "__init__.py"}
    TopologicalSorter({name: trees.keys() & dict(imported_names(tree)) for name, tree in trees.items()}).prepare()


def test_errors_import_other_floors_for_type_checkers_only() -> None:
    errors = next(module for module in MODULES if module.path == Path("errors.py"))
    guarded = [
        node for node in errors.tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    at_run_time = ast.Module([node for node in errors.tree.body if node not in guarded], type_ignores=[])
    assert not [unit for unit, _ in imported_units(at_run_time) if unit.floor > 0]


def test_applications_use_the_public_names() -> None:
    violations = {
        f"{module.path}:{line}: {unit.name}"
        for module in MODULES
        if module.unit in [UNITS[name] for name in ("cli", "mistralrs", "server", "wire")]
        for unit, line in imported_units(module.tree)
        if unit not in (module.unit, PUBLIC_API, UNITS["wire"]) and (module.unit.name, unit.name) not in WITHIN_A_FLOOR
    }
    assert not violations, "\n".join(sorted(violations))


def test_the_pure_pillar_never_names_torch() -> None:
    violations = [
        f"{module.path}:{line}"
        for module in MODULES
        if is_without_torch(module.unit)
        for name, line in imported_names(module.tree)
        if name.split(".")[0] == "torch"
    ]
    assert not violations, "\n".join(violations)


def test_importing_the_pure_pillar_loads_no_torch() -> None:
    names = [module.name for module in MODULES if is_without_torch(module.unit)]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules or 'transformers' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch or transformers')\n"
    )
    finished = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_only_config_env_reads_the_environment() -> None:
    readers = [
        f"{module.path}:{line}"
        for module in MODULES
        if module.path != Path("config/env.py")
        for line in reads_of_the_environment(module.tree)
    ]
    assert not readers, "\n".join(readers)


def test_no_module_holds_mutable_state() -> None:
    found = {f"{module.path}: {name}": line for module in MODULES for name, line in mutable_state(module.tree)}
    violations = sorted(f"{place}, line {line}" for place, line in found.items() if place not in STATE_OF_THE_PROCESS)
    assert not violations, "hold it in an object that is passed:\n" + "\n".join(violations)
    assert not STATE_OF_THE_PROCESS.keys() - found.keys(), "no state is left there: take it off the list"


def test_pillars_do_not_meet_below_the_runner() -> None:
    kv, models, runner = UNITS["kv"], UNITS["models"], UNITS["runner"]
    assert not models.may_import(kv)
    assert not UNITS["scheduler"].may_import(UNITS["kernels"])
    assert not kv.may_import(UNITS["chat"])
    assert runner.may_import(kv)
    assert runner.may_import(models)
    assert runner.may_import(UNITS["sampling"])
    assert not UNITS["sampling"].may_import(runner)


@pytest.mark.parametrize(
    ("source", "floors"),
    [
        ("import paged_sdk.engine.engine", [5]),
        ("from paged_sdk import config", [1]),
        ("from paged_sdk import Model", [8]),
        ("from paged_sdk.kv.paged import KvCacheManager", [2, 2]),
        ("def f():\n    from paged_sdk.worker.worker import Worker", [6, 6]),
        ("if TYPE_CHECKING:\n    import paged_sdk.runner.output", [4]),
        ("import os.path, attrs", []),
    ],
)
def test_the_walk_sees_imports(source: str, floors: list[int]) -> None:
    assert [unit.floor for unit, _ in imported_units(ast.parse(source))] == floors


@pytest.mark.parametrize(
    "source",
    ["os.environ['A']", "os.getenv('A')", "from os import environ", "def f():\n    return os.environ.get('A')"],
)
def test_the_walk_sees_reads_of_the_environment(source: str) -> None:
    assert list(reads_of_the_environment(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("cache = {}", ["cache"]),
        ("cache: dict[str, int] = dict()", ["cache"]),
        ("seen = [n for n in ()]", ["seen"]),
        ("counter = itertools.count()", ["counter"]),
        ("def f():\n    global state\n    state = 1", ["state"]),
        ("TABLE = {}\ndef f():\n    TABLE['a'] = 1", ["TABLE"]),
        ("TABLE = []\ndef f():\n    TABLE.append(1)", ["TABLE"]),
        ("TABLE = {}\ndef f():\n    TABLE['a'] += 1", ["TABLE"]),
        ("TABLE = {}\ndef f():\n    TABLE['a'].b = 1", ["TABLE"]),
        ("TABLE = {}\ndef f():\n    del TABLE['a']", ["TABLE"]),
        ("TABLE = {}\ndef f():\n    global TABLE\n    TABLE |= {}", ["TABLE"]),
        ("TABLE = Table()\ndef f():\n    TABLE.size = 1", ["TABLE"]),
        ("TABLE = Table()\nclass A:\n    def f(self):\n        TABLE.size += 1", ["TABLE"]),
        ("TABLE = Table()\ndef f():\n    TABLE.add(1)", ["TABLE"]),
        ("HEAP = []\ndef f():\n    heapq.heappush(HEAP, 1)", ["HEAP"]),
        ("def f(): ...\ndef g():\n    f.calls = 1", ["f"]),
        ("class A: ...\ndef g():\n    setattr(A, 'x', 1)", ["A"]),
        ("import torch\ndef f():\n    torch.backends.x = True", ["torch"]),
        ("def f():\n    globals()['a'] = 1", ["globals()"]),
        ("LOCK: Final = threading.Lock()", ["LOCK"]),
        ("@cache\ndef f(): ...", ["f"]),
        ("@functools.lru_cache(maxsize=8)\ndef f(): ...", ["f"]),
        ("class A:\n    @functools.cache\n    def f(self): ...", ["f"]),
        ("class A:\n    @cached_property\n    def f(self): ...", []),
        ("class A: ...\nclass B(A): ...\nA.B = B", []),
        ("TABLE = {'a': 1}", []),
        ("TABLE = {}\ndef f(TABLE):\n    TABLE['a'] = 1", []),
        ("TABLE = {}\ndef f():\n    TABLE = {}\n    TABLE['a'] = 1", []),
        ("__all__ = ['a']", []),
        ("names = ('a',)", []),
        ("def f():\n    local = {}\n    local['a'] = 1", []),
    ],
)
def test_the_walk_sees_mutable_state(source: str, names: list[str]) -> None:
    assert [name for name, _ in mutable_state(ast.parse(source))] == names
