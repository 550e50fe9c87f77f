"""gin text -> statements. What is done with them is in test_gin_source.py."""

from __future__ import annotations

from pathlib import Path

import gin

from trainer_kit.config.sources.gin_scan import scan_gin


def test_statements_come_in_order_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "inner.gin").write_text("b.x = 2\n")
    outer = tmp_path / "outer.gin"
    outer.write_text(
        "import some.module\na.x = 1\ninclude 'inner.gin'\nC:\n  y = 3\n  z = [%m, {'k': "
        "@nobody()}]\nm = 4\n"
    )

    scan = scan_gin(gin, [str(outer)], ["scope/d.e.x = 5"])

    assert scan.mistakes == []
    assert scan.imports == [("some.module", f"{outer}:1")]
    assert [(binding.name, binding.origin) for binding in scan.bindings] == [
        ("a.x", f"{outer}:2"),
        ("b.x", f"{tmp_path / 'inner.gin'}:1"),
        ("C.y", f"{outer}:5"),
        ("C.z", f"{outer}:6"),
        ("m", f"{outer}:7"),
        ("scope/d.e.x", "--gin_params"),
    ]
    assert scan.bindings[3].unknown_names == ("nobody",)


def test_what_stands_before_a_mistake_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "conf.gin"
    path.write_text("a.x = 1\na.y 2\n")

    scan = scan_gin(gin, [str(path), str(tmp_path / "gone.gin")], ["a.z = 3"])

    assert [binding.name for binding in scan.bindings] == ["a.x", "a.z"]
    assert [mistake.origin for mistake in scan.mistakes] == [
        f"{path}:2",
        str(tmp_path / "gone.gin"),
    ]


def test_nothing_is_bound_by_scanning() -> None:
    before = gin.config_str()

    scan_gin(gin, [], ["a.x = 1", "m = 2"])

    assert gin.config_str() == before
