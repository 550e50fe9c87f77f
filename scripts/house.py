"""The architecture rules of trainer_kit, as functions that return the breaches of each rule.

tests/unit/test_architecture.py applies every rule to the checkout, and to a sample that breaks the
rule.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import trainer_kit
from scripts.private_names import find_private_uses
from scripts.source_files import SourceFile, find_undocumented, is_annotated

PACKAGE = "trainer_kit"
EXPERIMENTS = f"{PACKAGE}.experiments"

# The folders, lowest first: a module imports from its own folder and from lower ones. Files stand
# for themselves.
FLOORS = (
    "errors",
    "files",
    "checkpoint_names",
    "config",
    "process",
    "typing",
    "runtime",
    "telemetry",
    "checkpoints",
    "inputs",
    "optimizers",
    "evals",
    "training",
    "callbacks",
    "serving",
    "run",
    "sweeps",
    "testing",
    "compat",
    "cli",
    "train",
    "sweep_worker",
    "__main__",
)

# Libraries that belong to a few modules, and what the lowest floors may import beside the standard
# library.
ONLY_IN = {
    "orbit": ("training.orbit_bases", "compat.model_garden"),
    "gin": ("config.sources", "compat.model_garden"),
    "absl.flags": ("run.flags", "train", "compat.model_garden"),
    "official": ("compat.model_garden",),
}
LIGHT_FLOORS = FLOORS[: FLOORS.index("typing")]
LIGHT_LIBRARIES = {"gin", "pydantic", "pydantic_core", "yaml"}
# The length of the one module that may import tf_keras, to tell its objects from others.
RECOGNISER_LINES = 60

# Where names may be used that a library does not publish: one module for each library, and the
# doors, which translate programs of other frameworks that use private names.
INTERNALS = (
    "config.sources.gin_internals",
    "runtime.keras_internals",
    "runtime.tensorflow_internals",
    "compat",
)

DOCUMENTED_SHARE = 0.9
BAD_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}


@dataclass(frozen=True)
class Import:
    """What a module imports: `target` is dotted and includes the name after `from ... import`."""

    target: str
    line: int
    at_start: bool


def get_floor(module: str) -> str | None:
    """Returns the floor of a module, or of a name in it.

    Returns None for the package itself, and for other packages.
    """
    return next((floor for floor in FLOORS if is_within(module, f"{PACKAGE}.{floor}")), None)


def is_within(name: str, module: str) -> bool:
    """Whether `name` is `module` or something inside it."""
    return name == module or name.startswith(module + ".")


# Several rules need the imports of a module.
@functools.cache
def list_imports(source: SourceFile) -> list[Import]:
    """Returns all imports of a module.

    They include those inside functions, for type checkers only, and by `import_module("...")`.
    """
    return [
        Import(target, getattr(node, "lineno", 0), at_start)
        for node, at_start in _iterate_nodes(source.tree, at_start=True)
        for target in _list_targets(node)
    ]


def lower_floors_only(sources: Sequence[SourceFile]) -> list[str]:
    """A module imports from its own folder and from lower ones.

    It names the module, and does not import from the front door of the package.
    """
    breaches = []
    for source in _select_package_sources(sources):
        floor = get_floor(source.module)
        if floor is None:
            breaches.append(
                f"{source.module} is on no floor; put it into a folder of FLOORS in"
                " scripts/house.py"
            )
            continue

        for item in list_imports(source):
            if not is_within(item.target, PACKAGE) or item.target == f"{PACKAGE}.__version__":
                continue
            place = f"{source.module}:{item.line}"
            other_floor = get_floor(item.target)
            if other_floor is None:
                breaches.append(f"{place} imports {item.target}, which is on no floor")
            elif FLOORS.index(other_floor) > FLOORS.index(floor):
                breaches.append(f"{place} imports {item.target}, which is on a higher floor")
    return breaches


def no_cycles(sources: Sequence[SourceFile]) -> list[str]:
    """No module imports itself, directly or through others.

    In config, imports inside functions count, too.
    """
    modules = {source.module for source in sources}
    graph = {}
    for source in sources:
        all_count = get_floor(source.module) == "config"
        imported_modules = set()
        for item in list_imports(source):
            if item.at_start or all_count:
                prefixes = _iterate_prefixes(item.target)
                imported_modules.add(next((name for name in prefixes if name in modules), ""))
        graph[source.module] = imported_modules - {"", source.module}

    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["modules import each other: " + " -> ".join(error.args[1])]
    return []


def light_lower_floors(sources: Sequence[SourceFile]) -> list[str]:
    """The lowest floors import the standard library and a few libraries that load quickly.

    TensorFlow and NumPy are not among them.
    """
    allowed = sys.stdlib_module_names | LIGHT_LIBRARIES | {PACKAGE}
    return [
        f"{source.module}:{item.line} imports {item.target}; its floor may use"
        f" {sorted(LIGHT_LIBRARIES)}"
        for source in _select_package_sources(sources)
        if get_floor(source.module) in LIGHT_FLOORS
        for item in list_imports(source)
        if item.target.split(".")[0] not in allowed
    ]


def restricted_libraries(sources: Sequence[SourceFile]) -> list[str]:
    """orbit, gin, absl.flags and official are imported where ONLY_IN says, and nowhere else."""
    return [
        f"{source.module}:{item.line} imports {item.target}; only {', '.join(rooms)} may"
        for source in _select_package_sources(sources)
        for item in list_imports(source)
        for library, rooms in ONLY_IN.items()
        if is_within(item.target, library)
        and not any(is_within(source.module, f"{PACKAGE}.{room}") for room in rooms)
    ]


def single_tf_keras_importer(sources: Sequence[SourceFile]) -> list[str]:
    """Outside of the doors at most one module, a small one, imports tf_keras."""
    users = [
        source
        for source in _select_package_sources(sources)
        if not is_within(source.module, f"{PACKAGE}.compat")
        and any(is_within(item.target, "tf_keras") for item in list_imports(source))
    ]
    large = [source.module for source in users if source.code_lines > RECOGNISER_LINES]
    several = [source.module for source in users] if len(users) > 1 else []
    return [
        f"{name} imports tf_keras, but only one module of at most {RECOGNISER_LINES} lines may"
        for name in several or large
    ]


def experiments_use_public_names(sources: Sequence[SourceFile]) -> list[str]:
    """An experiment imports no other one, and of trainer_kit only the names of its __all__."""
    public = set(trainer_kit.__all__)
    breaches = []
    for source in sources:
        if not source.module.startswith(f"{EXPERIMENTS}."):
            continue
        own = ".".join(source.module.split(".")[:3])

        for item in list_imports(source):
            place = f"{source.module}:{item.line}"
            if is_within(item.target, EXPERIMENTS):
                if not is_within(item.target, own):
                    breaches.append(f"{place} imports {item.target}, another experiment")
            elif is_within(item.target, PACKAGE):
                name = item.target.removeprefix(PACKAGE).removeprefix(".")
                if name and name not in public:
                    breaches.append(f"{place} imports {item.target}, which is not a public name")

        for name, line in _iterate_package_attributes(source):
            if name not in public:
                breaches.append(
                    f"{source.module}:{line} uses {PACKAGE}.{name}, which is not a public name"
                )
    return breaches


def package_knows_no_experiment(sources: Sequence[SourceFile]) -> list[str]:
    """The rest of trainer_kit imports no experiment, and nothing of it imports tests or scripts."""
    return [
        f"{source.module}:{item.line} imports {item.target}"
        for source in sources
        if is_within(source.module, PACKAGE)
        for item in list_imports(source)
        if item.target.split(".")[0] in ("tests", "scripts")
        or (is_within(item.target, EXPERIMENTS) and not is_within(source.module, EXPERIMENTS))
    ]


def private_names_in_their_modules(sources: Sequence[SourceFile]) -> list[str]:
    """Unpublished names of libraries and of other modules are used in INTERNALS only."""
    users: dict[str, str] = {}
    for use in find_private_uses(sources):
        if not any(is_within(use.module, f"{PACKAGE}.{room}") for room in INTERNALS):
            users.setdefault(
                use.module,
                f"{use.module}:{use.line} uses {use.name}, which is not public: {use.text}",
            )
    return list(users.values())


def safe_yaml(sources: Sequence[SourceFile]) -> list[str]:
    """YAML is read by safe loaders only.

    `yaml.load` needs one, or a class made from one, by name.
    """
    breaches = []
    for source in sources:
        if "yaml" in source.text:
            breaches += _list_yaml_breaches(source)
    return breaches


def names_say_what_is_inside(sources: Sequence[SourceFile]) -> list[str]:
    """No module is called utils or the like."""
    return [
        source.module for source in sources if BAD_NAMES & set(source.module.lower().split("."))
    ]


def module_docstrings(sources: Sequence[SourceFile]) -> list[str]:
    """Every module that is not empty begins with a docstring."""
    return [
        source.module
        for source in sources
        if source.tree.body and not ast.get_docstring(source.tree)
    ]


def annotated_functions(sources: Sequence[SourceFile]) -> list[str]:
    """Every function is fully annotated."""
    return [
        f"{source.module}:{function.lineno} {function.name} is not fully annotated"
        for source in sources
        for function in source.functions
        if not is_annotated(function)
    ]


def public_docstrings(sources: Sequence[SourceFile]) -> list[str]:
    """At least DOCUMENTED_SHARE of the public modules, classes and functions have a docstring."""
    count, missing = find_undocumented(sources)
    return missing if len(missing) > (1 - DOCUMENTED_SHARE) * count else []


Rule = Callable[[Sequence[SourceFile]], list[str]]
RULES: tuple[Rule, ...] = (
    lower_floors_only,
    no_cycles,
    light_lower_floors,
    restricted_libraries,
    single_tf_keras_importer,
    experiments_use_public_names,
    package_knows_no_experiment,
    private_names_in_their_modules,
    safe_yaml,
    names_say_what_is_inside,
    module_docstrings,
    annotated_functions,
    public_docstrings,
)


def _select_package_sources(sources: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """Returns the package's modules, without the top-level __init__, which names them all.

    Shipped experiments are written as those of users, with rules of their own.
    """
    return (
        source
        for source in sources
        if source.module.startswith(PACKAGE + ".") and not is_within(source.module, EXPERIMENTS)
    )


def _iterate_nodes(node: ast.AST, at_start: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields each node of a tree, and whether it runs when the module is imported."""
    pending = [(node, at_start)]
    while pending:
        parent, parent_runs = pending.pop()
        for child in ast.iter_child_nodes(parent):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            child_runs = parent_runs and not is_function and not _is_for_types(child)
            pending.append((child, child_runs))
            yield child, child_runs


def _iterate_prefixes(name: str) -> Iterator[str]:
    """Yields a dotted name and the names that it is in, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _list_targets(node: ast.AST) -> list[str]:
    """Returns the dotted names that a node imports; empty for a node that imports nothing."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call):
        function_name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        if function_name in ("import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            return [name for name in names if isinstance(name, str)]
    return []


def _iterate_package_attributes(source: SourceFile) -> Iterator[tuple[str, int]]:
    aliases = {
        alias.asname or alias.name
        for node in source.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == PACKAGE
    }
    for node in source.nodes:
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
        ):
            yield node.attr, node.lineno


def _list_yaml_breaches(source: SourceFile) -> list[str]:
    safe_loaders = {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if bases & safe_loaders:
                safe_loaders.add(node.name)

    breaches = []
    for node in source.nodes:
        place = f"{source.module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module == "yaml":
            breaches.append(f"{place} imports from yaml; use `import yaml`")
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "yaml" and alias.asname:
                    breaches.append(f"{place} gives yaml another name; use `import yaml`")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
            if _is_unsafe(node.attr):
                breaches.append(f"{place} uses yaml.{node.attr}, which is not safe")
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("yaml.load", "yaml.load_all"):
                named_loaders = [word.value for word in node.keywords if word.arg == "Loader"]
                loaders = [*node.args[1:2], *named_loaders]
                if not loaders or ast.unparse(loaders[0]) not in safe_loaders:
                    breaches.append(f"{place} calls yaml.load without a safe loader")
    return breaches


def _is_unsafe(name: str) -> bool:
    """Whether a name of the yaml module reads or makes more than plain values."""
    if name in ("load", "load_all"):
        return False
    return (
        "unsafe" in name.lower()
        or name.startswith("full_load")
        or (name.endswith("Loader") and "Safe" not in name)
    )
