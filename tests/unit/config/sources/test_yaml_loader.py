"""What scalars mean, which line everything is on, and what broken text is told."""

from __future__ import annotations

import json

import pytest
import yaml

from trainer_kit.config.sources.yaml_loader import dump, parse, parse_scalar
from trainer_kit.errors import ConfigError, Mistake


def read_mistakes(text: str) -> list[Mistake]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "conf.yaml")
    return list(caught.value.mistakes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5E+2", 150.0),
        (".5", 0.5),
        ("5.", 5.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("-.5e1", -5.0),
        ("1_000.5", 1000.5),
        ("500", 500),
        ("1_000_000", 1000000),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("off", "off"),
        ("yes", "yes"),
        ("y", "y"),
        ("null", None),
        ("~", None),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("'5'", "5"),
        ('"true"', "true"),
        ("gs://bucket/a*", "gs://bucket/a*"),
    ],
)
def test_a_scalar_means_what_it_looks_like(text: str, value: object) -> None:
    read = parse(f"key: {text}", "conf.yaml").values["key"]

    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("*.txt", "*.txt"), ("a: b", "a: b"), ("<<", "<<"), ("#5", "#5"), ("1e-3", 0.001)],
)
def test_a_bare_word_is_taken_as_it_is(text: str, value: object) -> None:
    assert parse_scalar(text) == value


def test_every_key_and_item_knows_its_line() -> None:
    parsed = parse("a:\n  b: 1\n\n  c:\n  - 5\n  - d: 6\ne: {f: 7,\n  g: 8}\n", "conf.yaml")

    assert parsed.values == {"a": {"b": 1, "c": [5, {"d": 6}]}, "e": {"f": 7, "g": 8}}
    assert parsed.lines == {
        "a": 1,
        "a.b": 2,
        "a.c": 4,
        "a.c.0": 5,
        "a.c.1": 6,
        "a.c.1.d": 6,
        "e": 7,
        "e.f": 7,
        "e.g": 8,
    }


def test_an_empty_document_is_none() -> None:
    assert parse("# nothing\n", "conf.yaml").values is None


def test_all_duplicate_keys_are_reported_with_both_places() -> None:
    first, second = read_mistakes("a: 1\nb: {c: 1, d: 2, c: 3}\na: 2\n")

    assert first.path == "b.c"
    assert first.origin == "conf.yaml:2:17"
    assert second.path == "a"
    assert second.origin == "conf.yaml:3:1"
    assert "line 1" in second.problem


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("a: [1, 2\nb: 3\n", "conf.yaml:2:2", "is not YAML"),
        ("a:\n\t- 1\n", "conf.yaml:2:1", "spaces, not tabs"),
        ("a: 1\n--- \nb: 2\n", "conf.yaml:2:1", "single document"),
        ("a: *nowhere\n", "conf.yaml:1:4", "nowhere"),
        ("a: 1\nb: \x07\n", "conf.yaml:2", "is not YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "conf.yaml:1:4", "python/object"),
        ("a: !!python/name:os.system\n", "conf.yaml:1:4", "python/name"),
        ("a: !!int abc\n", "conf.yaml:1:4", "cannot be read"),
        ("a: !!set {b, c}\n", "conf.yaml:1:4", "cannot be read"),
        ("a: &x {b: *x}\n", "conf.yaml:1:4", "holds itself"),
        ("a: {<<: 5}\n", "conf.yaml:1:9", "mapping"),
        ("? [1, 2]\n: 3\n", "conf.yaml:1:3", "cannot be read"),
    ],
)
def test_broken_text_is_reported_where_it_breaks(text: str, place: str, said: str) -> None:
    (mistake,) = read_mistakes(text)

    assert mistake.origin == place
    assert said in str(mistake)


def test_merged_mappings_give_what_is_not_written() -> None:
    text = "one: &one {x: 1, y: 2}\ntwo: &two {x: 3, z: 4}\nboth:\n  <<: [*one, *two]\n  y: 5\n"
    parsed = parse(text, "conf.yaml")

    assert parsed.values["both"] == {"x": 1, "y": 5, "z": 4}
    assert parsed.lines["both.y"] == 5


def test_json_is_read_as_json_is_meant_with_lines() -> None:
    text = '{\n\t"a": {\n\t\t"b": "off",\n\t\t"smile": "\\ud83d\\ude00 \\/"},\n\t"c": 1E3}'
    parsed = parse(text, "conf.json")

    assert parsed.values == json.loads(text)
    assert parsed.lines["a.b"] == 3
    assert parsed.lines["c"] == 5
    assert read_mistakes('{"a": 1,\n "b" 2}')[0].origin == "conf.yaml:2:6"
    assert "twice" in read_mistakes('{"a": 1,\n "a": 2}')[0].problem


@pytest.mark.parametrize(
    "word",
    ["off", "yes", "1e-3", "010", "12:30", "true", "null", "2024-01-01", "0o17", "<<", "", "5"],
)
def test_written_words_are_words_for_yaml_1_1_readers_too(word: str) -> None:
    text = dump({"key": word})

    assert parse(text, "conf.yaml").values == {"key": word}
    assert yaml.safe_load(text) == {"key": word}


def test_floats_keep_every_bit_and_no_aliases_are_written() -> None:
    shared = [1e-07, 0.1 + 0.2, 1e22, -0.0, 5e-324, 1.7976931348623157e308]
    text = dump({"a": shared, "b": shared})

    assert "&" not in text

    again = parse(text, "conf.yaml").values
    assert [number.hex() for number in again["a"]] == [number.hex() for number in shared]
    assert yaml.safe_load(text)["b"] == shared


def test_a_tuple_as_python_writes_it_is_a_list() -> None:
    text = yaml.dump({"a": (1, 2), "b": [(3,), ()], "c": [4]})

    assert "!!python/tuple" in text

    parsed = parse(text, "conf.yaml")
    assert parsed.values == {"a": [1, 2], "b": [[3], []], "c": [4]}
    assert parsed.lines["a.1"] == 3

    (mistake,) = read_mistakes("a: !!python/tuple {b: 1}\n")
    assert mistake.origin == "conf.yaml:1:4"


def _build_aliases(template: str, count: int = 30) -> str:
    """A document in which each line names the one before it several times."""
    lines = [template.format(key=f"k{i}", alias=f"*k{i - 1}") for i in range(1, count)]
    return "\n".join(["k0: &k0 {x: 1}", *lines])


TOO_MANY = "more than 30,000 values"
TOO_DEEP = "nested more than 64 levels"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_build_aliases("{key}: &{key} [{alias}, {alias}]"), TOO_MANY),
        (_build_aliases("{key}: &{key} {{<<: [{alias}, {alias}], {key}: {alias}}}"), TOO_MANY),
        (_build_aliases("{key}: &{key} {{a: {alias}}}", 2000), TOO_DEEP),
        ("".join(f"{' ' * level}a:\n" for level in range(400)), TOO_DEEP),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", TOO_DEEP),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", TOO_DEEP),
        ("a" * 2**18 + "b", "longer than 262,144 characters"),
    ],
)
def test_what_would_take_for_ever_to_read_is_refused(text: str, problem: str) -> None:
    (mistake,) = read_mistakes(text)
    assert problem in mistake.problem
    assert mistake.origin.startswith("conf.yaml")


def test_aliases_and_large_lists_of_a_sensible_size_are_read() -> None:
    text = "a: &a [1, 2]\nb: {c: *a, d: [*a, *a]}\ne: " + "[" * 60 + "]" * 60 + f"\nf: {[0] * 1000}"
    values = parse(text, "conf.yaml").values

    assert values["b"] == {"c": [1, 2], "d": [[1, 2], [1, 2]]}
    assert len(values["f"]) == 1000


def test_a_file_of_our_own_may_hold_what_is_written_out_in_it() -> None:
    many = "a: &a [" + "1, " * 200 + f"1]\nb: [{'*a, ' * 200}*a]"
    long = many + "\n#" + "-" * 50_000

    assert TOO_MANY in read_mistakes(many)[0].problem
    assert TOO_MANY in read_mistakes(long)[0].problem
    assert len(parse(long, "params.yaml", is_trusted=True).values["b"]) == 201

    with pytest.raises(ConfigError, match=TOO_MANY):
        parse(many, "params.yaml", is_trusted=True)


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "9" * 5000])
def test_a_number_of_too_many_digits_stays_text(number: str) -> None:
    assert parse_scalar(number) == parse(f"a: {number}", "conf.yaml").values["a"] == number
