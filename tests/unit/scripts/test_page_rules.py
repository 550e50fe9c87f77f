"""The limits on pages, each applied to a sample that exceeds it.

tests/unit/test_architecture.py applies them to the package.
"""

from __future__ import annotations

import pytest

from scripts import page_rules
from scripts.source_files import SourceFile

DENSE_LINE = "total = sum(f(a[i], b[i]) * c.d for i in range(n) if g(i) and not h(a, i))"
FOUR_FUNCTIONS = """
Apply = Callable[[int], int]
class Saver:
    def __init__(self, a: Callable[[], int], b: Apply, c: Apply | None, d: Apply) -> None: ...
"""
DATACLASS_OF_FOUR_FUNCTIONS = """
@dataclasses.dataclass
class Saver:
    a: Callable[[], int]
    b: Callable[[], int]
    c: Callable[[], int]
    d: Callable[[], int]
"""

SAMPLES = [
    pytest.param(page_rules.nodes_per_line, DENSE_LINE, id="dense line"),
    pytest.param(page_rules.nodes_per_statement, DENSE_LINE, id="dense statement"),
    pytest.param(page_rules.few_functions_in_constructors, FOUR_FUNCTIONS, id="alias"),
    pytest.param(
        page_rules.few_functions_in_constructors, DATACLASS_OF_FOUR_FUNCTIONS, id="dataclass"
    ),
    pytest.param(
        page_rules.few_parameters_of_type_any, "def f(a: Any, b: int) -> None: ...", id="Any"
    ),
    pytest.param(
        page_rules.few_parameters_of_type_any, "def f(a: list[Any]) -> None: ...", id="inside"
    ),
    pytest.param(
        page_rules.few_parameters_of_type_any, "def f(a: object) -> None: ...", id="object"
    ),
    pytest.param(page_rules.no_bare_participles, "def _collected() -> None: ...", id="participle"),
]


@pytest.mark.parametrize(("rule", "text"), SAMPLES)
def test_page_rule_finds_a_sample_that_exceeds_it(rule: page_rules.PageRule, text: str) -> None:
    assert rule([SourceFile("trainer_kit.sample", text)]) != []


@pytest.mark.parametrize("rule", page_rules.PAGE_RULES, ids=lambda rule: rule.__name__)
def test_page_rule_ignores_other_packages(rule: page_rules.PageRule) -> None:
    text = "\n".join([DENSE_LINE, FOUR_FUNCTIONS, "def collected(a: Any) -> None: ..."])

    assert rule([SourceFile("scripts.sample", text)]) == []


def test_annotations_do_not_count_as_nodes() -> None:
    typed = SourceFile("m", "def f(a: dict[str, list[int]]) -> int:\n    b: int = 1")
    untyped = SourceFile("m", "def f(a):\n    b = 1")

    # An annotated assignment is another node than a plain one, with as many parts.
    assert page_rules.count_nodes(typed) == page_rules.count_nodes(untyped)
