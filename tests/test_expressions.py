"""Expressions from users and files: they mean what they mean to `re`, and none of them can stop a load."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies
from transformers import LlamaForCausalLM
from transformers.core_model_loading import WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import InvalidPatcherError, Patcher, UnmatchedPatchError
from patcher.expressions import checked_expression, matches, search
from patcher.integrations.quantizers import names_setting
from tests.support.sampling import sampled
from tests.support.tiny import save_tiny, tiny_llama_config

# --- none of them can stop a load ----------------------------------------------------------------------------------

#: One atom and its repeat; groups of few, repeated or not: what may take exponential time, and what may not.
ATOMS = strategies.sampled_from(r"a b . \. [ab] [^a] \w $ (?i:a) (?:) \( a{2} (?#()".split(" "))
REPEATS = strategies.sampled_from(["", "", "", "*", "+", "?", "*?", "{2}", "{1,}", "{30}"])
PARTS = strategies.tuples(ATOMS, REPEATS).map("".join)
GROUPS = strategies.lists(PARTS | strategies.just("|"), min_size=1, max_size=3).map(lambda each: f"({''.join(each)})")
EXPRESSIONS = strategies.lists(PARTS | strategies.tuples(GROUPS, REPEATS).map("".join), max_size=3).map("".join)


def is_valid(expression: str) -> bool:
    try:
        re.compile(expression)
    except re.error:
        return False
    return True


@settings(max_examples=500, deadline=None)
@given(EXPRESSIONS.filter(is_valid), strategies.text("ab.!(", max_size=25))
def test_what_is_taken_is_searched_as_re_does_and_in_no_time(expression: str, text: str) -> None:
    before = time.thread_time()
    if re.search(r"\)(\*|\+|\{)", expression):  # it may be refused
        with contextlib.suppress(InvalidPatcherError):
            search(expression, text + "a" * 25)
    else:
        assert search(expression, text + "a" * 25) is (re.search(expression, text + "a" * 25) is not None)
    assert time.thread_time() - before < 0.5


@pytest.mark.parametrize(
    "expression",
    [
        r"model\.layers\.(\d|1\d)\.(mlp|attn)?\..*",
        "(?:experts){2}",
        r"([0-9a-f]{2}){4}",
        "(?x) a b # c)",
        r"[(|)]+ \(a|b\)+",
    ],
)
def test_what_takes_no_time_is_taken(expression: str) -> None:
    assert checked_expression("x", expression) == expression


SLOW = ["(a+)+$", "(a|a)+$", "(a|aa)+$", "(.*a){20}b", r"^(([a-z])+.)+[A-Z]([a-z])+$", "(?:a?){30}a{30}"]


class MyMLP(LlamaMLP):  # type: ignore[misc]
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


def data(**fields: Any) -> Patcher:
    return Patcher.from_dict({"schema": 1} | fields, allowed=[MyMLP])


#: Where a patcher, or a file that it is read from, has expressions that meet the names of a model or a checkpoint.
FIELDS: dict[str, Callable[[str], Patcher]] = {
    "new_weights": lambda text: Patcher({"LlamaMLP": MyMLP}, new_weights=text, dropped_weights="aa!"),
    "dropped_weights": lambda text: Patcher({"LlamaMLP": MyMLP}, dropped_weights=[text, "aa!"]),
    "conversions": lambda text: Patcher(extra_weight_conversions=WeightRenaming(text, "other")),
    "dropped_weights of data": lambda text: data(
        class_mapping={"LlamaMLP": f"{__name__}:MyMLP"}, dropped_weights=[text, "aa!"]
    ),
}


@pytest.mark.parametrize("expression", SLOW)
@pytest.mark.parametrize("field", FIELDS)
def test_no_expression_can_stop_a_load(field: str, expression: str) -> None:
    with pytest.raises(
        InvalidPatcherError, match=r"a repeat or alternatives in it.* 'a\+\$' finds what '\(a\+\)\+\$'"
    ):
        FIELDS[field](expression)


@pytest.mark.parametrize(
    ("expression", "text"),
    [("a|ab", "ab"), ("a|ab", "abc"), ("(?i)A|AB", "ab"), ("b", "ab"), ("a", "a\n"), ("", ""), ("a$|b", "a")],
)
def test_the_whole_text_is_matched_as_re_does(expression: str, text: str) -> None:
    assert matches(expression, text) is (re.fullmatch(expression, text) is not None)


#: An expression in whose search every name of a model takes longer than there is time.
ENDLESS = r"(\w|[a-z._]|.)+[A-Z]$"
WHERE: dict[str, Callable[[], object]] = {
    "settings of a quantizer": lambda: names_setting(f"re:{ENDLESS}", *["model.layers.0.self_attn.q_proj"] * 2),
}


@pytest.mark.parametrize("where", WHERE)
def test_nor_can_one_that_a_config_brings(where: str) -> None:
    with pytest.raises(InvalidPatcherError, match="a group that is repeated"):
        WHERE[where]()


def test_what_the_error_advises_works() -> None:
    text = "a" * 100 + "!"
    with pytest.raises(
        InvalidPatcherError, match=r"'\[ab\]\+' for '\(a\|b\)\+', and one repeat for two: 'a\+\$' finds"
    ):
        search("(a|b)+", text)
    assert search("a+$", text) is search("[ab]+$", text) is False
    assert search("a+$", text[:-1]) is search("[ab]+$", text[:-1]) is True


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(" * 4000 + "a" + ")" * 4000, "the expression is too large to be compiled"),
        ("a{99999999999999999999}", "the expression is too large to be compiled"),
        ("a{" + "9" * 5000 + "}", "the expression is too large to be compiled"),
        ("(", r"isn't a regular expression: .*\. For a literal text write '\\\\\('"),
    ],
)
def test_what_nobody_could_compile_is_refused(expression: str, message: str) -> None:
    for make in (
        lambda: Patcher({expression: MyMLP}),
        lambda: Patcher(filtered_weight_conversion_patterns=expression),
        lambda: Patcher(new_weights=[expression]),
        lambda: data(dropped_weights=[expression]),
        lambda: checked_expression("x", expression),
    ):
        with pytest.raises(InvalidPatcherError, match=message):
            make()


#: As many of everything as a patcher may have, in forms that are and aren't searched at once.
MANY = 10_000
CROWDS: dict[str, Callable[[], Patcher]] = {
    "names": lambda: Patcher({f"Nope{i}": MyMLP for i in range(MANY)}, strict=False),
    "class expressions": lambda: Patcher({f"^Nope{i}$": MyMLP for i in range(250)}, strict=False),
    "grouped": lambda: Patcher({rf"Nope{i}(Foo|Bar)?\d*": MyMLP for i in range(250)}, strict=False),
    "strict names": lambda: Patcher({f"Nope{i}": MyMLP for i in range(MANY)}),
    "filters": lambda: Patcher({}, [f"^nope{i}" for i in range(250)], strict=False),
    "new and dropped": lambda: Patcher(
        {"LlamaMLP": MyMLP},
        new_weights=[rf"\.{i}\.nope$" for i in range(250)],
        dropped_weights=["aa!", *(rf"\.{i}\.nope\d*$" for i in range(249))],
    ),
}


@pytest.mark.parametrize("crowd", sampled(CROWDS, {"names", "grouped"}))
def test_as_many_as_there_may_be_are_loaded_in_seconds(crowd: str, folder: Path) -> None:
    LlamaForCausalLM.from_pretrained(folder)
    before = time.thread_time()  # not the process's: torch has threads that spin
    asked, messages = CROWDS[crowd](), []
    for do in (lambda: LlamaForCausalLM.from_pretrained(folder, patcher=asked), lambda: patcher.plan(folder, asked)):
        with warnings.catch_warnings(), contextlib.suppress(UnmatchedPatchError):
            warnings.simplefilter("ignore", patcher.PatcherWarning)
            messages += getattr(do(), "problems", ())
    assert time.thread_time() - before < 10  # two where nothing else runs; a search that backtracks takes minutes
    assert all("and others" in message and len(message) < 10_000 for message in messages)


def test_ten_thousand_keys_of_a_checkpoint_are_planned_in_about_a_second() -> None:
    keys = {f"model.layers.{i % 2}.mlp.extra{i}.weight": (4,) for i in range(MANY)}
    asked = Patcher({"LlamaMLP": MyMLP}, dropped_weights=[rf"\.extra\d*{i}\." for i in range(0, 10, 2)])
    before = time.process_time()
    planned = patcher.plan(tiny_llama_config(), asked, model_class=LlamaForCausalLM, checkpoint=keys)
    assert len(planned.dropped_weights) == MANY / 2
    assert len(planned.left_over) == MANY
    assert time.process_time() - before < 8
