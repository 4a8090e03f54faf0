"""Expressions from users and files: they mean what they mean to `re`, and none of them can stop a load."""

from __future__ import annotations

import contextlib
import functools
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from safetensors.torch import save_file
from transformers import LlamaForCausalLM
from transformers.core_model_loading import WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP

import patcher
from patcher import InvalidPatcherError, Patcher, PatcherError, UnmatchedPatchError, expressions
from patcher.expressions import checked_expression, compiled, matches, search
from patcher.integrations.quantizers import names_setting
from tests.support.sampling import sampled
from tests.support.speed import slowness
from tests.support.tiny import save_tiny, tiny_llama_config

# --- they mean what they mean to `re` ------------------------------------------------------------------------------

ATOMS = strategies.sampled_from(
    r"a b . \. \d \w \s \b ^ $ \Z {e} {i<=1} { } a{e} [[:alpha:]] [a&&b] [a--b] [[a] []a] [^]b] [^\]a] [a-c] [{] \{ "
    r"(?:a|b) (a) (?P<n>b) (?=a) (?!b) (?<=a) (?>a) (?#[{) \\ # - (?i:A) layers 0 1".split(" ")
)
QUANTIFIERS = strategies.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "++", "{2}", "{1,}", "{,2}", "{0,1}?", "{}", "{a}"]
)
EXPRESSIONS = strategies.lists(
    strategies.one_of(strategies.tuples(ATOMS, QUANTIFIERS).map("".join), strategies.just("|")), max_size=7
).map("".join)
TEXTS = strategies.text("aAb01.{}e[]:&-\\# \nlpi<=", max_size=12)


def is_valid(expression: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sets that may once be nested
        try:
            re.compile(expression)
        except re.error:
            return False
        return True


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS.filter(is_valid), strategies.lists(TEXTS, min_size=1, max_size=6))
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
def test_an_expression_means_what_it_means_to_re(expression: str, texts: list[str]) -> None:
    for text in texts:
        meant = re.search(expression, text) is not None
        assert search(expression, text) is meant, text
        # a text that is too long for `re`: what is limited finds the same
        assert (compiled(expression)._limited_search(text) is not None) is meant, text


# --- none of them can stop a load ----------------------------------------------------------------------------------

SLOW = ["(a+)+$", "(a|a)+$", "(a|aa)+$", "(.*a){20}b", r"^(([a-z])+.)+[A-Z]([a-z])+$", "(?:a?){30}a{30}"]
LONG = "model.layers.0.mlp." + "a" * 3000 + "!"


class MyMLP(LlamaMLP):  # type: ignore[misc]
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, and a tensor in it with a long name."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {LONG: tensors["model.norm.weight"].clone()}, folder / "model.safetensors", {"format": "pt"})
    return folder


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
QUICK = ("new_weights",)  # nothing is missing, so nothing is searched


@pytest.mark.crossed
@pytest.mark.parametrize("do", ["load", "plan"])
@pytest.mark.parametrize("expression", SLOW)
@pytest.mark.parametrize("field", [field for field in FIELDS if field not in QUICK])
def test_no_expression_can_stop_a_load(
    field: str, expression: str, do: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "SEARCH_SECONDS", 0.2)
    compiled.cache_clear()  # what an expression has spent is remembered
    asked = FIELDS[field](expression)
    before, message = time.process_time(), ""
    try:
        if do == "load":
            LlamaForCausalLM.from_pretrained(folder, patcher=asked)
        else:
            message = " ".join(patcher.plan(folder, asked).problems)
    except PatcherError as error:
        message = str(error)
    assert time.process_time() - before < 5
    # Some of them `regex` is quick with.
    assert not message or re.search(
        r"takes too long: .* limit of 0\.2 seconds|took no tensor|matches no|doesn't|don't", message
    )


def test_an_expression_has_one_limit_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search would be over in time; ten thousand of them wouldn't."""
    monkeypatch.setattr(expressions, "SEARCH_SECONDS", 0.5)
    compiled.cache_clear()
    text = next(
        text for text in ("a" * size + "!" for size in range(10, 60)) if seconds(search, "(a|aa)+$", text) > 0.02
    )
    compiled.cache_clear()
    before = time.process_time()
    with pytest.raises(InvalidPatcherError, match=r"The expression '\(a\|aa\)\+\$' takes too long: .* 0\.5 seconds"):
        list(map(functools.partial(search, "(a|aa)+$"), [text] * 10_000))
    assert time.process_time() - before < 2


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
def test_nor_can_one_that_a_config_brings(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SEARCH_SECONDS", 0.2)
    compiled.cache_clear()
    with pytest.raises(InvalidPatcherError, match="takes too long"):
        WHERE[where]()


def seconds(call: Callable[..., object], *args: Any) -> float:
    before = time.process_time()
    call(*args)
    return time.process_time() - before


def test_what_the_error_advises_works(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.cache_clear()
    text = "a" * 5000 + "!"
    with pytest.raises(InvalidPatcherError, match=r"limit of 1 seconds.* 'a\+\$' finds what '\(a\+\)\+\$' does"):
        search("(a+)+$", text)
    assert not search("a+$", text)
    assert search("a+$", text[:-1]) is search("(a+)+$", "a" * 10)
    before = time.process_time()
    with pytest.raises(InvalidPatcherError, match="takes too long"):  # at once: its time is over
        search("(a+)+$", text)
    assert time.process_time() - before < 0.2
    monkeypatch.setattr(expressions, "_MINUTE", 0.0)  # which is over
    before = time.process_time()
    with pytest.raises(InvalidPatcherError, match="takes too long"):
        search("(a+)+$", text)
    assert time.process_time() - before > 0.5  # it had a second again


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(?:(?:a{1000}){1000}){1000}b*|c", "repeats more than 1,000 times, and no name is that long; write smaller"),
        ("(?:" * 30 + "a" + "?){2}" * 30, "repeats more than 1,000 times"),
        ("a{1000000}", "repeats more than 1,000 times"),
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
    "grouped": lambda: Patcher({rf"Nope{i}(Foo|Bar)+\d*": MyMLP for i in range(250)}, strict=False),
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
    taken = time.thread_time() - before
    # Two alone, ten in a process that has imported hundreds of models; a search that backtracks takes minutes.
    assert taken < 20 * slowness()
    assert all("and others" in message and len(message) < 10_000 for message in messages)


@pytest.mark.parametrize(
    "make",
    [
        lambda texts: Patcher(dict.fromkeys(texts, MyMLP)),
        lambda texts: Patcher(filtered_weight_conversion_patterns=texts),
        lambda texts: Patcher({"LlamaMLP": MyMLP}, new_weights=texts),
        lambda texts: data(dropped_weights=texts),
    ],
)
def test_more_expressions_than_can_be_searched_are_refused(make: Callable[[list[str]], Patcher]) -> None:
    make([f"^Nope{i}$" for i in range(250)])
    with pytest.raises(InvalidPatcherError, match=r"251 expressions are too many, at most 250 are searched; fold"):
        make([f"^Nope{i}$" for i in range(251)])


def test_ten_thousand_keys_of_a_checkpoint_are_planned_in_about_a_second(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"model.layers.{i % 2}.mlp.extra{i}.weight": torch.zeros(4) for i in range(MANY)}, file)
    asked = Patcher({"LlamaMLP": MyMLP}, dropped_weights=[rf"\.extra\d*{i}\." for i in range(0, 10, 2)])
    before = time.process_time()
    planned = patcher.plan(tiny_llama_config(), asked, model_class=LlamaForCausalLM, checkpoint=file)
    assert len(planned.dropped_weights) == MANY / 2
    assert len(planned.left_over) == MANY
    assert time.process_time() - before < 10 * slowness()
