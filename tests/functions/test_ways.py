"""A function is replaced wherever a module calls it, or that is refused: it is never left as it was in silence."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patcher import like
from patcher.errors import PatchConstructionError
from patcher.functions import rebinding
from patcher.functions.models import find_functions, replaced_now, restore_functions, swap_functions
from tests.functions import modeling_ways, modeling_ways_elsewhere
from tests.support.written_modules import written_module

WAYS = {
    name: cls
    for name, cls in vars(modeling_ways).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == modeling_ways.__name__
}
PARTS = ("Other", "ItsCallerAsAnAttribute", "Applying", "SettingAFunction")
FOLLOWED = sorted(name for name in WAYS if not name.startswith("Not") and name not in PARTS)
#: how each gets at the function
REFUSED = {
    "NotInATable": "through TABLE, a dict",
    "NotInAList": "through LISTED, a list",
    "NotInATableOfTheClass": "through its attribute 'table', a dict",
    "NotInATableOfTheClassBody": "through table, a dict",
    "NotInATableOfAModule": r"through elsewhere\.TABLE, a dict",
    "NotInAPartialAttribute": "through its attribute 'function', a partial",
    "NotInAPartial": "through partial, a partial",
    "NotThroughAModule": r"through elsewhere\.double",
    "NotThroughAModulesFunction": r"through elsewhere\.through_elsewhere",
    "NotImportedInside": "through an import of tests.functions.modeling_ways_elsewhere where it runs",
    "NotByAModuleImportedInside": "through an import of tests.functions.modeling_ways_elsewhere where it runs",
    "NotOnAFunction": r"through holding\.function",
    "NotInAHook": "through a hook in '_forward_hooks'",
    "NotAMethodInAHook": "through a hook in '_forward_pre_hooks'",
    "NotInAHiddenModule": "through its attribute 'hidden', a list",
    "NotInAModuleOfTheFile": "through directly, a Sequential",
    "NotInAModuleOfTheClass": "through hidden, a Directly",
    "NotInAClassOfTheClass": "through Inside, a type",
    "NotByTheClass": r"through StaticMethod\.part",
    "NotInAnotherClass": "through NoModule, a type",
    "NotInAnAutogradFunction": "through Doubling, a FunctionMeta",
    "NotInAnObject": "through instance, a NoModule",
    "NotInAnObjectsAttribute": "through holder, a Holder",
    "NotAModuleEachTime": "through a Directly that it builds in each call",
    "NotThroughAnObject": "through wrapped, a Wrapper",
    "NotInAHiddenClosure": "through its variable 'held', a list",
    "NotAPartialMethod": "through forward, a partialmethod",
    "NotAProperty": "through part, a property",
    "NotACachedProperty": "through part, a cached_property",
    "NotThroughACache": "through cached, a _lru_cache_wrapper",
    "NotACacheInAClosure": "through its variable 'with_cache', a _lru_cache_wrapper",
    "NotABoundMethod": "through its attribute 'function', a method",
    "NotWithAGlobal": "through a function that uses the global 'counted', which changes",
    "NotBesideAGlobal": "through a function that uses the global 'kernel', which changes",
    "NotAClosureThatChanges": "through its variable 'function', which changes",
}


def triple(x: Any) -> Any:
    return x * 3


LAYERS = ((("double", triple),),)
LIKES = (((like("tests.functions.modeling_ways_elsewhere:double"), triple),),)
ONE = torch.ones(())


def replaced(module: nn.Module, layers: Any = LAYERS) -> nn.Module:
    swap_functions(module, find_functions(module, layers))
    return module


def value(module: nn.Module) -> float:
    return float(module(ONE))


def test_there_is_a_case_for_each_way() -> None:
    assert {name for name in WAYS if name.startswith("Not")} == REFUSED.keys()
    assert len(FOLLOWED) > 25


@pytest.mark.parametrize("layers", [LAYERS, LIKES], ids=["by name", "like"])
@pytest.mark.parametrize("way", FOLLOWED)
def test_a_call_is_followed(way: str, layers: Any) -> None:
    module, stock = WAYS[way](), WAYS[way]()
    functions = find_functions(module, layers)
    assert [each.replacement for each in functions.replaced] == [triple]
    swap_functions(module, functions)
    assert (value(module), value(stock), value(WAYS[way]())) == (3, 2, 2)
    assert isinstance(module, WAYS[way])
    assert str(type(module)) == str(WAYS[way])
    assert (type(module).__name__, type(module).__module__) == (way, modeling_ways.__name__)
    assert modeling_ways.double(1) == modeling_ways_elsewhere.double(1) == 2
    if way != "AsAnAttribute":  # the attribute is what changes, and not the class
        assert inspect.getsource(type(module)) == inspect.getsource(WAYS[way])
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert value(again) == 3
        assert type(again) is type(module)


class Deprecated:
    """As `torch.distributed.reduce_op`, which warns."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} is looked up on what no model uses")


@pytest.mark.parametrize("way", ["InheritedFromAnotherFile", "InAClosure"])
def test_what_no_model_uses_is_not_looked_at(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (modeling_ways, modeling_ways_elsewhere):
        monkeypatch.setattr(module, "deprecated", Deprecated(), raising=False)
    assert value(replaced(WAYS[way]())) == 3


LAZY = """
from torch import nn

{0}from not_imported import double
{0}import not_imported


class Lazily(nn.Module):
    def forward(self, x):
        return double(x)


class NotLazily(nn.Module):
    def forward(self, x):
        return not_imported.double(x)
"""


def test_what_is_imported_lazily_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lazy import` of Python 3.15 binds another object until a name is used."""
    (tmp_path / "not_imported.py").write_text("def double(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = LAZY.format("lazy " if sys.version_info >= (3, 15) else "")
    module = written_module(text, tmp_path / "lazy.py")
    assert value(replaced(module.Lazily())) == 3
    with pytest.raises(PatchConstructionError, match=r"through not_imported\.double"):
        replaced(module.NotLazily())


@pytest.mark.parametrize("way", FOLLOWED)
def test_a_call_is_restored(way: str) -> None:
    module = replaced(WAYS[way]())
    restore_functions(module)
    assert value(module) == 2
    assert type(module) is WAYS[way]


@pytest.mark.parametrize("way", FOLLOWED)
def test_what_is_replaced_now_is_read_off_the_modules(way: str) -> None:
    module = replaced(WAYS[way]())
    for around in (module, nn.Sequential(nn.Identity(), module, WAYS[way](), pickle.loads(pickle.dumps(module)))):
        (hit,) = replaced_now(around)
        assert (hit.name.rpartition(":")[2], hit.replacement) == ("double", triple)
        assert hit.callers == ("Directly" if way == "CalledByAPart" else way,)
    restore_functions(module)
    assert replaced_now(module) == ()


def test_an_init_may_keep_what_calls_a_function_that_is_replaced() -> None:
    """It has called nothing yet: only a function that an `__init__` calls is refused."""
    way = modeling_ways.ItsCallerAsAnAttribute
    assert (value(replaced(way())), value(way())) == (3, 2)


@pytest.mark.parametrize("layers", [LAYERS, LIKES], ids=["by name", "like"])
@pytest.mark.parametrize("way", REFUSED)
def test_a_call_that_can_not_be_followed_is_refused(way: str, layers: Any) -> None:
    module = WAYS[way]()
    said = rf"double'\)? can't be replaced for {way} alone: .* \(\S+\) reaches it {REFUSED[way]}, not by calling "
    with pytest.raises(PatchConstructionError, match=said):
        find_functions(module, layers)
    assert type(module) is WAYS[way]


def test_a_function_that_other_code_sets_as_an_attribute_is_refused() -> None:
    """Nothing that the classes say would tell a report, or a way back, of which function it took the place."""
    module = WAYS["Applying"](modeling_ways.double)
    with pytest.raises(PatchConstructionError, match="its attribute 'function', which other code has set, not by"):
        find_functions(module, LAYERS)
    assert value(replaced(nn.Sequential(module, WAYS["Directly"]()))) == 9


def test_a_module_that_refers_to_one_of_the_model_is_followed() -> None:
    """As a part that keeps its parent in a list, so that it isn't one of its own parts."""
    module = nn.Sequential(WAYS["Directly"](), WAYS["Directly"]())
    module[1].others = [module[0], module]
    assert value(replaced(module)) == 9


def test_a_method_of_an_object_that_a_module_keeps_is_refused() -> None:
    """The object's other methods, which it calls, can't be changed for one model."""
    module = WAYS["Other"]()
    module.function = modeling_ways.WithTwoMethods().first
    with pytest.raises(PatchConstructionError, match="through its attribute 'function', a method, not by calling"):
        find_functions(module, LAYERS)


@pytest.mark.parametrize("way", ["ByAnotherName", "InAnotherFile", "InheritedFromAnotherFile"])
def test_a_function_of_a_module_is_meant_wherever_it_is_called(way: str) -> None:
    exact = ((("tests.functions.modeling_ways_elsewhere:double", triple),),)
    assert value(replaced(WAYS[way](), exact)) == 3
    other = ((("tests.functions.modeling_ways:double", triple),),)
    assert find_functions(WAYS[way](), other).replaced == ()


def times(number: int) -> Any:
    def multiplied(x: Any) -> Any:
        return x * number

    return multiplied


def test_a_function_of_a_module_wins_over_a_bare_name_and_the_inner_mapping_over_the_outer() -> None:
    exact, bare = ("tests.functions.modeling_ways:double", times(5)), ("double", times(7))
    for layers, expected in [
        (((exact, bare),), 5),
        (((bare, exact),), 5),
        (((bare,), (exact,)), 7),
        (((exact,), (bare,)), 5),
        (((("no_such", times(1)),), (bare,)), 7),
    ]:
        functions = find_functions(WAYS["Directly"](), layers)
        assert value(replaced(WAYS["Directly"](), layers)) == expected
        (found,) = functions.replaced
        assert {key for _, key in found.keys} == {key for layer in layers for key, _ in layer} - {"no_such"}


def test_modules_of_one_class_share_one_class_and_those_of_another_mapping_have_another() -> None:
    one, two = map(type, replaced(nn.Sequential(WAYS["BySuper"](), WAYS["BySuper"]())).children())
    assert one is two
    assert type(replaced(WAYS["BySuper"](), ((("double", times(4)),),))) is not one


def test_what_was_made_is_forgotten_with_its_objects() -> None:
    import gc

    before = set(rebinding.rebinders)
    module = replaced(WAYS["BySuper"](), ((("double", times(4)),),))
    assert len(set(rebinding.rebinders) - before) == 1
    del module
    gc.collect()
    assert set(rebinding.rebinders) <= before


def test_a_class_is_called_as_the_one_that_it_was_made_of() -> None:
    made = type(replaced(WAYS["CalledByAPart"]()))
    module = type(replaced(WAYS["Directly"]()))()
    assert type(module) is WAYS["Directly"]
    assert value(module) == 2
    assert issubclass(made, nn.Module)


def test_a_module_that_was_changed_meanwhile_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy holds what the names of the module were bound to."""
    keep = replaced(WAYS["ThroughAFunction"]())
    monkeypatch.setattr(modeling_ways, "helper", lambda x, again=modeling_ways.helper: again(x) * 11)
    assert value(replaced(WAYS["ThroughAFunction"]())) == 33
    monkeypatch.setattr(WAYS["Directly"], "forward", lambda self, x: x * 13)
    assert find_functions(WAYS["Directly"](), LAYERS).replaced == ()
    assert value(keep) == 3


@pytest.mark.parametrize("seed", range(12))
def test_random_lines_of_functions_and_classes(seed: int, tmp_path: Any) -> None:
    """Functions that call each other at random, in classes that inherit at random: the sum counts every call."""
    source, names = _program(random.Random(seed))
    space: dict[str, Any] = {"nn": nn, "__name__": f"random_modeling_{seed}"}
    exec(compile(source, "<random>", "exec"), space)
    for name in names:
        expected = _value_with(source, name, space["__name__"])
        module = space[name]()
        stock = float(module(ONE))
        replaced(module, ((("leaf", lambda x: x + 100),),))
        assert float(module(ONE)) == expected
        assert float(space[name]()(ONE)) == stock


def _program(draw: random.Random) -> tuple[str, list[str]]:
    lines = ["def leaf(x):", "    return x + 1"]
    functions = ["leaf"]
    for number in range(draw.randint(1, 5)):
        called = draw.sample(functions, draw.randint(1, len(functions)))
        lines += [f"def f{number}(x):", "    return " + " + ".join(f"{each}(x)" for each in called)]
        functions.append(f"f{number}")
    classes: list[str] = []
    for number in range(draw.randint(2, 5)):
        base = draw.choice(["nn.Module", *classes])
        lines.append(f"class C{number}({base}):")
        calls = " + ".join(f"{each}(x)" for each in draw.sample(functions, draw.randint(1, 2)))
        above = " + super().forward(x)" if base != "nn.Module" and draw.random() < 0.7 else ""
        lines += ["    def forward(self, x):", f"        return {calls}{above}"]
        classes.append(f"C{number}")
    return "\n".join(lines), classes


def _value_with(source: str, name: str, module: str) -> float:
    """What the whole program gives with the other function."""
    space: dict[str, Any] = {"nn": nn, "__name__": module}
    exec(compile(source, "<random>", "exec"), space)
    space["leaf"] = lambda x: x + 100
    return float(space[name]()(ONE))
