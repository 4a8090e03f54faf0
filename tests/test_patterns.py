"""The language of paths: what reports print is what a pattern means, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from patcher import InvalidPatcherError
from patcher.patterns import check_path, compress, matches_path, nearest_paths

SEGMENTS = strategies.sampled_from(["0", "1", "2", "3", "10", "11", "00", "01", "²", "٣", "a", "b", "layers", "x-y"])
PATHS = strategies.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)


@given(strategies.sets(PATHS, max_size=30), strategies.sets(PATHS, max_size=30))
def test_what_is_printed_means_what_it_was_made_of(chosen: set[str], others: set[str]) -> None:
    printed = compress(sorted(chosen))
    meant = {
        path for path in chosen | others if any(matches_path(check_path("a path", text), path) for text in printed)
    }
    assert meant == chosen


@pytest.mark.parametrize(
    ("pattern", "means", "not_this"),
    [
        (
            "model.layers.0.mlp",
            ["model.layers.0.mlp"],
            ["model.layers.00.mlp", "layers.0.mlp", "model.layers.0.mlp.x"],
        ),
        ("layers.{0..3}", ["layers.0", "layers.3"], ["layers.4", "layers.03", "layers", "layers.0.x", "layers.a"]),
        ("layers.{0,2..5}.x", ["layers.0.x", "layers.5.x"], ["layers.1.x", "layers.6.x"]),
        ("layers.{7}", ["layers.7"], ["layers.70"]),
        ("layers.{0..99999999999}", ["layers.12345678901"], ["layers.999999999999"]),
        ("*.mlp", ["a.mlp", "0.mlp"], ["mlp", "a.b.mlp"]),
        ("**.mlp", ["mlp", "a.mlp", "a.b.c.mlp"], ["mlp.a", "", "a.smlp"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["b", "", "b.a"]),
        ("a.**.b.*", ["a.b.c", "a.x.y.b.c", "a.b.b.b"], ["a.b", "a.x.b"]),
        ("**", ["", "a", "a.b"], []),
        ("**.**", ["", "a", "a.b"], []),
        ("(root)", [""], ["a", "(root)"]),
    ],
)
def test_a_pattern_means(pattern: str, means: list[str], not_this: list[str]) -> None:
    assert [path for path in means if not matches_path(pattern, path)] == []
    assert [path for path in not_this if matches_path(pattern, path)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (3, r"3 \(int\) isn't a path of a module; write for instance 'model\.layers\.\{0\.\.3\}\.mlp'"),
        ("", r"the empty path is ambiguous; write '\(root\)' for the model itself, '\*\*' for all"),
        ("a..b", r"'a\.\.b' isn't a path of modules: 'a\.\.b' in it has no meaning .* Write names with one dot"),
        ("a.", "'' in it has no meaning"),
        (r"\.mlp$", r"isn't a path of modules: '\\\\' in it has no meaning \(a path isn't a regular expression\)"),
        ("layers.(0|1)", r"'\(0\|1\)' in it has no meaning"),
        ("layers.*_proj", r"'\*_proj' in it has no meaning .* \* for one whole name"),
        ("a.***", r"'\*\*\*' in it has no meaning"),
        ("layers.{3..0}", r"'\{3\.\.0\}' in it has no meaning .* \{0\.\.3\} or \{0,2\.\.5\} for numbers in asc"),
        ("layers.{0, 2}", r"'\{0, 2\}' in it"),
        ("layers.{a,b}", r"'\{a,b\}' in it"),
        ("layers.{}", r"'\{\}' in it"),
        ("layers.{00}", r"'\{00\}' in it"),
        ("layers.{0..3", r"'\{0\.\.3' in it"),
        ("layers{0..3}.mlp", r"'layers\{0\.\.3\}' in it"),
    ],
)
def test_what_is_no_pattern_is_refused_with_what_to_write(pattern: object, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        check_path("a path", pattern)


def test_no_pattern_takes_long() -> None:
    """A regular expression of as many `.*` would take longer than the universe has existed."""
    pattern, path = ".".join(["**", "a"] * 60), ".".join(["a"] * 59 + ["b"] * 60)
    assert not matches_path(pattern, path)


MODULES = [f"model.layers.{number}.{name}" for number in range(30) for name in ("self_attn", "mlp", "mlp.up_proj")]


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("model.layer.{0..3}.mlp", "model.layers.{0..29}.mlp"),
        ("model.layers.{30..40}.self_attn", "model.layers.{0..29}.self_attn"),
        ("**.self_atn", "model.layers.{0..29}.self_attn"),
        ("**.mpl", "model.layers.{0..29}.mlp"),
        ("layers.*.mlp", "model.layers.{0..29}.mlp"),
    ],
)
def test_what_was_meant_is_found(pattern: str, nearest: str) -> None:
    assert nearest_paths(pattern, MODULES)[0] == nearest
    assert nearest_paths("zzz", MODULES) == []
