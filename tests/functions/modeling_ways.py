"""Modules that call `double` in every way that Python has: a class for each, by what its name says.

Those whose name begins with `Not` can't be followed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

import tests.functions.modeling_ways_elsewhere as elsewhere
from tests.functions.modeling_ways_elsewhere import Base, double as twice, through_elsewhere


def double(x: Any) -> Any:
    return x * 2


class Directly(nn.Module):
    def forward(self, x: Any) -> Any:
        return double(x)


def helper(x: Any) -> Any:
    return double(x)


class ThroughAFunction(nn.Module):
    def forward(self, x: Any) -> Any:
        return helper(x)


def even(x: Any, times: int) -> Any:
    return x if times == 0 else odd(double(x), times - 1)


def odd(x: Any, times: int) -> Any:
    return x if times == 0 else even(x, times - 1)


class ThroughACircle(nn.Module):
    def forward(self, x: Any) -> Any:
        return even(x, 1)


class InALambda(nn.Module):
    def forward(self, x: Any) -> Any:
        return (lambda y: double(y))(x)


class InAComprehension(nn.Module):
    def forward(self, x: Any) -> Any:
        return sum([double(each) for each in (x,)])


class InAFunctionInside(nn.Module):
    def forward(self, x: Any) -> Any:
        def inside() -> Any:
            return double(x)

        return inside()


class HandedOn(nn.Module):
    def forward(self, x: Any) -> Any:
        return run(double, x)


def run(function: Callable[[Any], Any], x: Any) -> Any:
    return function(x)


class Inherited(Directly):
    pass


class BySuper(Directly):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class BySuperTwice(BySuper):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Other(nn.Module):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Diamond(Other, Directly):
    pass


class StaticMethod(nn.Module):
    @staticmethod
    def part(x: Any) -> Any:
        return double(x)

    def forward(self, x: Any) -> Any:
        return self.part(x)


class ClassMethod(nn.Module):
    @classmethod
    def part(cls, x: Any) -> Any:
        return double(x)

    def forward(self, x: Any) -> Any:
        return self.part(x)


class NotAProperty(nn.Module):
    @property
    def part(self) -> Any:
        return double(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return self.part * x


class NotACachedProperty(nn.Module):
    @functools.cached_property
    def part(self) -> Any:
        return double(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return self.part * x


class InADefault(nn.Module):
    def forward(self, x: Any, function: Any = double) -> Any:
        return function(x)


class InAKeywordDefault(nn.Module):
    def forward(self, x: Any, *, function: Any = double) -> Any:
        return function(x)


def closing(function: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        return function(x)

    return forward


class InAClosure(nn.Module):
    forward = closing(double)


def plainly(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @plainly
    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        return double(x)


@plainly
def decorated(x: Any) -> Any:
    return double(x)


class ThroughADecoratedFunction(nn.Module):
    def forward(self, x: Any) -> Any:
        return decorated(x)


class DecoratedByTransformers(nn.Module):
    @deprecate_kwarg("y", version="9.0", new_name="x")
    def forward(self, x: Any) -> Any:
        return double(x)


class RotaryDecorated(nn.Module):
    rope_type = "default"
    config = None

    @torch.no_grad()
    @dynamic_rope_update
    def part(self, x: Any, position_ids: Any) -> Any:
        return double(x)

    def forward(self, x: Any) -> Any:
        return self.part(x, None)


class ReturningATuple(nn.Module):
    class config:  # noqa: N801
        return_dict = False

    @can_return_tuple
    def part(self, x: Any) -> Any:
        return (double(x),)

    def forward(self, x: Any) -> Any:
        return self.part(x)[0]


@functools.lru_cache(maxsize=4)
def cached(times: int) -> Any:
    return double(torch.ones(()) * times)


class NotThroughACache(nn.Module):
    def forward(self, x: Any) -> Any:
        return cached(1) * x


def closing_over_a_cache(function: Any) -> Any:
    with_cache = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(self: Any, x: Any) -> Any:
        return with_cache(self, x)

    return wrapper


class NotACacheInAClosure(nn.Module):
    @closing_over_a_cache
    def forward(self, x: Any) -> Any:
        return double(x)


class AsAClassAttribute(nn.Module):
    function = staticmethod(double)

    def forward(self, x: Any) -> Any:
        return self.function(x)


class AsAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = double

    def forward(self, x: Any) -> Any:
        return self.function(x)


class ItsCallerAsAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = helper

    def forward(self, x: Any) -> Any:
        return self.function(x)


class NotABoundMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = self.part

    def part(self, x: Any) -> Any:
        return double(x)

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Applying(nn.Module):
    """Calls what it is given; its own code names no function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class PassedToAPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Applying(double)

    def forward(self, x: Any) -> Any:
        return self.part(x)


class SettingAFunction(nn.Module):
    def __init_subclass__(cls) -> None:
        cls.function = staticmethod(double)


class SetForEachSubclass(SettingAFunction):
    def forward(self, x: Any) -> Any:
        return self.function(x)


class CalledByAPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Directly()])

    def forward(self, x: Any) -> Any:
        return self.parts[0](x)


class ByAnotherName(nn.Module):
    """As the function that it is: `tests.functions.modeling_ways_elsewhere:double`."""

    def forward(self, x: Any) -> Any:
        return twice(x)


class InAnotherFile(nn.Module):
    def forward(self, x: Any) -> Any:
        return through_elsewhere(x)


class InheritedFromAnotherFile(Base):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


# --- what can't be followed ----------------------------------------------------------------------------------------

TABLE = {"double": double}
LISTED = [(helper, 1)]


class NotInATable(nn.Module):
    def forward(self, x: Any) -> Any:
        return TABLE["double"](x)


class NotInAList(nn.Module):
    def forward(self, x: Any) -> Any:
        return LISTED[0][0](x)


class NotInATableOfTheClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"double": double}

    def forward(self, x: Any) -> Any:
        return self.table["double"](x)


class NotInATableOfTheClassBody(nn.Module):
    table = {"double": double}  # noqa: RUF012

    def forward(self, x: Any) -> Any:
        return self.table["double"](x)


class NotInATableOfAModule(nn.Module):
    def forward(self, x: Any) -> Any:
        return elsewhere.TABLE["double"](x)


class NotInAPartialAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(helper)

    def forward(self, x: Any) -> Any:
        return self.function(x)


partial = functools.partial(double)


class NotInAPartial(nn.Module):
    def forward(self, x: Any) -> Any:
        return partial(x)


class NotThroughAModule(nn.Module):
    def forward(self, x: Any) -> Any:
        return elsewhere.double(x)


class NotThroughAModulesFunction(nn.Module):
    def forward(self, x: Any) -> Any:
        return elsewhere.through_elsewhere(x)


class NotImportedInside(nn.Module):
    def forward(self, x: Any) -> Any:
        from tests.functions.modeling_ways_elsewhere import double

        return double(x)


class NotByAModuleImportedInside(nn.Module):
    def forward(self, x: Any) -> Any:
        import tests.functions.modeling_ways_elsewhere as imported

        return imported.double(x)


def holding(x: Any) -> Any:
    return x


holding.function = double  # type: ignore[attr-defined]


class NotOnAFunction(nn.Module):
    def forward(self, x: Any) -> Any:
        return holding.function(x)  # type: ignore[attr-defined]


class NotInAHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: helper(output))

    def forward(self, x: Any) -> Any:
        return x


class NotAMethodInAHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(self.part)

    def part(self, module: nn.Module, args: Any) -> Any:
        return (double(args[0]),)

    def forward(self, x: Any) -> Any:
        return x


class NotInAHiddenModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Directly()]

    def forward(self, x: Any) -> Any:
        return self.hidden[0](x)


directly = nn.Sequential(Directly())


class NotInAModuleOfTheFile(nn.Module):
    def forward(self, x: Any) -> Any:
        return directly(x)


class NotInAModuleOfTheClass(nn.Module):
    hidden = Directly()

    def forward(self, x: Any) -> Any:
        return self.hidden(x)


class NotInAClassOfTheClass(nn.Module):
    class Inside:
        def __call__(self, x: Any) -> Any:
            return double(x)

    def forward(self, x: Any) -> Any:
        return self.Inside()(x)


class NotByTheClass(nn.Module):
    def forward(self, x: Any) -> Any:
        return StaticMethod.part(x)


class NoModule:
    def __call__(self, x: Any) -> Any:
        return double(x)


class NotInAnotherClass(nn.Module):
    def forward(self, x: Any) -> Any:
        return NoModule()(x)


class NotInAnAutogradFunction(nn.Module):
    def forward(self, x: Any) -> Any:
        return Doubling.apply(x)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return double(x)


instance = NoModule()


class NotInAnObject(nn.Module):
    def forward(self, x: Any) -> Any:
        return instance(x)


class Holder:
    def __init__(self, function: Any) -> None:
        self.function = function


holder = Holder(double)


class NotInAnObjectsAttribute(nn.Module):
    def forward(self, x: Any) -> Any:
        return holder.function(x)


class WithTwoMethods:
    def first(self, x: Any) -> Any:
        return self.second(x)

    def second(self, x: Any) -> Any:
        return double(x)


class NotAModuleEachTime(nn.Module):
    def forward(self, x: Any) -> Any:
        return Directly()(x)


class Wrapper:
    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@Wrapper
def wrapped(x: Any) -> Any:
    return double(x)


class NotThroughAnObject(nn.Module):
    def forward(self, x: Any) -> Any:
        return wrapped(x)


def hiding(function: Any) -> Any:
    held = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return held[0](*args)

    return wrapper


class NotInAHiddenClosure(nn.Module):
    @hiding
    def forward(self, x: Any) -> Any:
        return double(x)


class NotAPartialMethod(nn.Module):
    def part(self, times: int, x: Any) -> Any:
        return double(x) * times

    forward = functools.partialmethod(part, 1)


counted = 0


def counting(x: Any) -> Any:
    global counted
    counted += 1
    return double(x)


class NotWithAGlobal(nn.Module):
    def forward(self, x: Any) -> Any:
        return counting(x)


kernel: Any = None


def load_kernel() -> None:
    global kernel
    kernel = double


class NotBesideAGlobal(nn.Module):
    def forward(self, x: Any) -> Any:
        return double(x) if kernel is None else kernel(x)


def rebinding(function: Any) -> Any:
    def wrapper(self: Any, x: Any) -> Any:
        nonlocal function
        function = double if function is double else function
        return function(x)

    return wrapper


class NotAClosureThatChanges(nn.Module):
    forward = rebinding(double)
