"""How a class calls projections of one input: which methods are rewritten, and how.

Where all calls of a method have one variable for an argument, one call of the joined layer and a split take their
place. Elsewhere the rewritten method asks at run time, call by call, whether the argument is the very tensor that the
first one had: see `patcher.compat.standing_alone`. Either is right if nothing between the first call and the last one
writes into that tensor, which is all that the source is read for.
"""

from __future__ import annotations

import ast
import hashlib
import threading
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from patcher.fusions.callers import Caller, taken_as_modules
from patcher.fusions.lookups import are_unchanged, lookups
from patcher.fusions.methods import (
    Method,
    NotUnderstoodError,
    functions_of,
    is_importable,
    located,
    method_to_rewrite,
    self_of,
    trees_of,
)
from patcher.fusions.purity import (
    OF_A_TENSOR,
    Body,
    arguments_of,
    check,
    is_plain,
    is_plain_function,
    parameters_of,
    positions,
    problem_of,
    shown,
)
from patcher.source.call_sites import none_by_default

_LATER = ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.GeneratorExp
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp
_LOOPS = ast.For | ast.While
_OF_TORCH = frozenset(vars(nn.Module()))
#: What a tensor has that is no tensor.
_NO_PART = ("shape", "dtype", "device")


@dataclass(frozen=True)
class Form:
    """How one method is rewritten.

    Attributes:
        calls: which of the calls of its projections, in the order of the source, are rewritten.
        is_split: whether one call and a split take the place of the calls; otherwise inputs are compared at run time.
        is_copied: whether each part is a copy, because it may be written into or given away.
        checked: what has to hold when the method is called, as source; the original method runs otherwise.
        digest: of the source, so that a class that is made again somewhere else is made of the same.
    """

    method: str
    calls: tuple[int, ...]
    is_split: bool
    is_copied: bool
    checked: tuple[str, ...]
    digest: str


def digest_of(method: Method) -> str:
    return hashlib.sha256(ast.dump(method.node).encode()).hexdigest()[:16]


def called_parts(tree: ast.AST, group: Iterable[str], this: str = "") -> list[ast.Call]:
    """The calls of these children in a method, in the order in which they are written."""
    this = this or (self_of(tree) if isinstance(tree, ast.FunctionDef) else "")
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in group
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == this
    ]
    return sorted(found, key=positions)


def called_with(cls: type[nn.Module], names: Iterable[str]) -> list[tuple[str, ...]]:
    """The children of a module, among these, that a method calls with one variable, in the order of the calls."""
    found: list[tuple[str, ...]] = []
    for tree in trees_of(cls).values():
        #: a variable, and how often it has been assigned -> what is called with it
        given: dict[tuple[str, int], list[str]] = {}
        for call in called_parts(tree, names):
            if len(call.args) == 1 and isinstance(call.args[0], ast.Name) and not call.keywords:
                name = call.args[0].id
                before = [each for each in ast.walk(tree) if name in _assigned_by(each)]
                value = name, sum(positions(each)[1] <= positions(call)[0] for each in before)
                given.setdefault(value, []).append(_name(call))
        found += [tuple(dict.fromkeys(called)) for called in given.values() if len(set(called)) > 1]
    return found


@dataclass(frozen=True, eq=False)
class _Answer:
    """What was found out about modules of a class, as long as all that was looked at is what it was.

    Attributes:
        constants: the attributes of the module, and of the one around it, whose values were used.
    """

    key: Any
    lookups: tuple[Any, ...]
    constants: tuple[Mapping[str, Any], Mapping[str, Any]]
    forms: tuple[Form, ...]
    reason: str

    def is_about(self, module: nn.Module, key: Any, caller: Caller | None) -> bool:
        modules = (module, caller.module if caller is not None else None)
        used = ((vars(owner).get(name), value) for owner, each in zip(modules, self.constants, strict=True)
                for name, value in each.items())  # fmt: skip
        return self.key == key and all(now == value for now, value in used)


_lock = threading.RLock()
_answers: weakref.WeakKeyDictionary[type[nn.Module], list[_Answer]] = weakref.WeakKeyDictionary()


#: A module, the projections that it is about, and the module around it, where that is known.
Candidate = tuple[nn.Module, tuple[str, ...], Caller | None]


def forms_of(module: nn.Module, group: tuple[str, ...], caller: Caller | None) -> tuple[Form, ...]:
    """How the methods of a module are rewritten that call several of its projections.

    Raises:
        NotUnderstoodError: why they can't be, with the line.
    """
    found = forms_of_all({"": (module, group, caller)})[""]
    if isinstance(found, str):
        raise NotUnderstoodError(found)
    return found


def forms_of_all(modules: Mapping[str, Candidate]) -> dict[str, tuple[Form, ...] | str]:
    """The same for many modules by their paths, or why they can't be: what is alike is looked at once."""
    around = {path: caller.classes if caller is not None else None for path, (_, _, caller) in modules.items()}
    kept = {cls: is_importable(cls) for cls in {type(module) for module, _, _ in modules.values()}}
    result: dict[str, tuple[Form, ...] | str] = {}
    here: dict[type[nn.Module], list[_Answer]] = {}
    holding: list[_Answer] = []
    with _lock:
        for path, (module, group, caller) in modules.items():
            cls, key = type(module), (group, _structure(module, group), around[path])
            known = (_answers if kept[cls] else here).setdefault(cls, [])
            alike = (each for each in known if each.is_about(module, key, caller))
            answer = next((each for each in alike if each in holding or are_unchanged(each.lookups)), None)
            if answer is None:
                answer = _answered(module, group, caller, key)
                known[:] = [each for each in known if each.key != key or are_unchanged(each.lookups)]
                known.append(answer)
            holding.append(answer)
            result[path] = answer.reason or answer.forms
    return result


def _answered(module: nn.Module, group: tuple[str, ...], caller: Caller | None, key: Any) -> _Answer:
    forms: tuple[Form, ...] = ()
    reason, constants = "", dict[str, Any]()
    lookups.begin()
    try:
        forms = _forms_of(module, group, caller, constants)
        reason = caller.uses_as_modules(group) if caller is not None else ""
    except NotUnderstoodError as error:
        reason = str(error)
    finally:
        noted = lookups.end()
    around = caller.constants if caller is not None else {}
    return _Answer(key, noted, (constants, around), forms, reason)


def _structure(module: nn.Module | None, group: Iterable[str] = ()) -> Any:
    """What of a module decides what its code does, but for the values of its attributes."""
    if module is None:
        return None
    attributes = tuple((name, _kind(name, value)) for name, value in vars(module).items() if name not in _OF_TORCH)
    held = tuple((name, value is None) for name, value in (*module._parameters.items(), *module._buffers.items()))
    children = tuple((name, None if name in group else _structure(each)) for name, each in module._modules.items())
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return type(module), has_hooks, attributes, held, children


def _kind(name: str, value: Any) -> Any:
    if callable(value) or name in ("inplace", "max_norm"):
        return value
    return type(value), isinstance(value, list | tuple) and is_plain(value)


def _forms_of(
    module: nn.Module, group: tuple[str, ...], caller: Caller | None, constants: dict[str, Any]
) -> tuple[Form, ...]:
    cls = type(module)
    trees = trees_of(cls)
    if not any({_name(call) for call in called_parts(tree, group)} == {*group} for tree in trees.values()):
        for name in functions_of(cls).keys() - trees.keys():
            method_to_rewrite(cls, name)  # the source of which can't be read, and that may be why
        raise NotUnderstoodError(f"no method of {cls.__name__} calls {', '.join(group)} together")
    forms = []
    for name in sorted(name for name, tree in trees.items() if called_parts(tree, group)):
        method = method_to_rewrite(cls, name)
        try:
            calls = _Calls(method, module, group, caller, constants)
            if calls.are_all_called:
                forms.append(calls.form())
            elif alone := sorted({_name(call) for call in calls.calls}):
                raise NotUnderstoodError(f"{name} calls {', '.join(alone)} alone", calls.calls[0].lineno)
        except NotUnderstoodError as error:
            raise located(error, method) from error
    for name, tree in trees.items():
        _check_uses(tree, group, name, cls)
    if not forms:
        raise NotUnderstoodError(f"{', '.join(group)} are never called together")
    return tuple(forms)


def _check_uses(tree: ast.FunctionDef, group: tuple[str, ...], method: str, cls: type[nn.Module]) -> None:
    """Raise for a use of a projection that isn't a call, or a look at its weight."""
    where, this = f"{cls.__name__}.{method}", self_of(tree)
    for node in taken_as_modules(tree, group, lambda owner: getattr(owner, "id", None) == this):
        if not isinstance(node.ctx, ast.Load):
            raise NotUnderstoodError(f"{where}: {node.attr} is assigned")
        raise NotUnderstoodError(f"{where} takes {node.attr} as a module of its own")
    for call in ast.walk(tree):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Attribute(attr=part)), attr=name)) if (
                part in group and name.endswith("_")
            ):
                raise NotUnderstoodError(f"{where} writes into {ast.unparse(call.func.value)}", call.lineno)  # type: ignore[attr-defined]


class _Calls:
    """The calls of one method."""

    def __init__(
        self,
        method: Method,
        module: nn.Module,
        group: tuple[str, ...],
        caller: Caller | None,
        constants: dict[str, Any],
    ) -> None:
        self.method, self.module, self.group, self.caller = method, module, group, caller
        self.around = dict(_parents(method.node))
        body = Body(method, module)
        body.constants = constants
        self._ruled_out: list[tuple[str, ast.AST]] = []
        self._reached = dict.fromkeys(body.reached(self._ruled_out))
        self.calls = [call for call in called_parts(method.node, group) if call in self._reached]
        self.are_all_called = {_name(call) for call in self.calls} == {*group}
        #: those that calls are in, which run again
        self.loops = {each for call in self.calls for each in self._ancestors(call) if isinstance(each, _LOOPS)}

    def form(self) -> Form:
        for call in self.calls:
            self._check_call(call)
        self._before = self._nodes_before()
        self._assigned: dict[str, list[ast.AST]] = {}
        containing = set(self._ancestors(self.calls[-1]))
        for node in self._before:
            for name in _assigned_by(node) if node not in containing else ():
                self._assigned.setdefault(name, []).append(node)
        roots = self._shared_roots()
        is_split = self._is_straight()
        region = list(self._between(is_split=is_split))
        last = positions(self.calls[-1])[1]
        later = [node for node in ast.walk(self.method.node) if isinstance(node, _LATER)]
        later = [node for node in later if node is not self.method.node and positions(node)[0] < last]
        followed = [node for node in later if isinstance(node, ast.GeneratorExp) or self._is_followed(node)]
        region += [inner for node in followed for inner in ast.walk(node) if inner is not node]
        try:
            known = self._known_for(region)
        except NotUnderstoodError as error:
            raise NotUnderstoodError(f"between the projections: {error}", error.line) from error
        for node in later:
            if node not in followed:
                raise NotUnderstoodError(f"{shown(node)!r} may run between the projections", positions(node)[0][0])
        self._check_assigned(region, roots, is_split=is_split)
        conditions = [text for text, node in self._ruled_out if self._matters(node, roots)]
        if known:
            conditions.append(f"{self_of(self.method.node)}.are_values({', '.join(known)})")
        every = called_parts(self.method.node, self.group)
        return Form(
            self.method.name,
            calls=tuple(number for number, call in enumerate(every) if call in self.calls),
            is_split=is_split,
            is_copied=self._is_written(),
            checked=tuple(dict.fromkeys(conditions)),
            digest=digest_of(self.method),
        )

    def _nodes_before(self) -> list[ast.AST]:
        """What may run before the last call: only that decides what variables are between the calls."""
        end = max(positions(each)[1] for each in (self.calls[-1], *self.loops))
        return [node for node in self._reached if not hasattr(node, "end_lineno") or positions(node)[0] <= end]

    def _known_for(self, region: list[ast.AST]) -> list[str]:
        """The parameters that must be values for nothing to write between the calls.

        Raises:
            NotUnderstoodError: something may write there, whatever they are.
        """
        tensors = self._given()
        known: Any = {"tensors": tensors, "parts": self.group, "runs": self._before}
        known["since"] = None if self.loops else positions(self.calls[0])[1]

        def check_with(values: Iterable[str]) -> None:
            check(Body(self.method, self.module, values, **known), region)

        names: list[str] = []
        try:
            check_with(names)
        except NotUnderstoodError:
            names = [name for name in parameters_of(self.method.node)[1:] if name not in tensors]
            check_with(names)
            for name in names.copy():  # those without which it isn't known
                try:
                    check_with({*names} - {name})
                    names.remove(name)
                except NotUnderstoodError:
                    continue
        return names

    def _is_followed(self, node: ast.AST) -> bool:
        """Whether a function that is defined in the method is looked at with it: its parameters have other names."""
        return is_plain_function(node) and self._given().isdisjoint(parameters_of(node))  # type: ignore[arg-type]

    def _given(self) -> set[str]:
        """The variables that the calls are given, and those that are handed on to them."""
        return {_argument(call).id for call in self.calls}.union(*map(self._roots, self.calls))

    def _check_assigned(self, region: list[ast.AST], roots: set[str], *, is_split: bool) -> None:
        """Raise where a variable has another value when a later call is made."""
        for call in self.calls[1:]:
            name = _argument(call).id
            if name not in roots and not is_split:
                continue
            for node in region:
                if name in _assigned_by(node) and (positions(node)[1] <= positions(call)[0] or self._is_again(node)):
                    raise NotUnderstoodError(f"{name} is assigned between the projections", node.lineno)  # type: ignore[attr-defined]

    def _is_again(self, node: ast.AST) -> bool:
        """Whether a statement is in a loop that has calls, but isn't the one that computes the first."""
        return not self.loops.isdisjoint(self._ancestors(node))

    # --- which branches run ------------------------------------------------------------------------------------------

    def _matters(self, branch: ast.AST, roots: set[str]) -> bool:
        """Whether it would make a difference if a branch ran after all."""
        first, last = positions(self.calls[0]), positions(self.calls[-1])
        if called_parts(branch, self.group, self_of(self.method.node)):
            return True
        start, end = positions(branch)
        names = {_argument(call).id for call in self.calls} | roots
        is_between = first[0] < end and start < last[1]
        return is_between or (start < last[1] and any(_assigned_by(node) & names for node in ast.walk(branch)))

    # --- what they are given -----------------------------------------------------------------------------------------

    def _check_call(self, call: ast.Call) -> None:
        name = _name(call)
        if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
            raise NotUnderstoodError(f"{name} is called with more than one input", call.lineno)
        if not isinstance(call.args[0], ast.Name):
            raise NotUnderstoodError(f"the input of {name} is {shown(call.args[0])!r}, not a variable", call.lineno)
        for node in self._ancestors(call):
            if isinstance(node, _LATER | _COMPREHENSIONS) and node is not self.method.node:
                raise NotUnderstoodError(f"{name} is used inside of a {type(node).__name__}", call.lineno)

    def _shared_roots(self) -> set[str]:
        """The variables whose value each projection is given in turn.

        Which they are is seen when they run. Here it is whether they are likely to be one tensor, as the others are
        computed for nothing if they aren't.

        Raises:
            NotUnderstoodError: they are given different ones, or the caller passes another input for some of them.
        """
        node, passed = self.method.node, ""
        names = {_argument(call).id for call in self.calls}
        if len(names) == 1:
            return names
        optional = none_by_default(node)
        #: projection -> what each of its calls may be given
        given: dict[str, set[frozenset[str]]] = {}
        for call in self.calls:
            roots = self._roots(call)
            for name in sorted(roots.intersection(optional)):
                if self.caller is None and len(roots) == 1:
                    continue  # it isn't known
                what = self.caller.passes(name) if self.caller is not None else ""
                roots -= set() if what else {name}
                passed = passed or what
            if roots:  # otherwise it isn't made
                given.setdefault(_name(call), set()).add(frozenset(roots))
        for name, several in given.items() if self.caller is None else ():
            sure = {roots for roots in several if not roots.intersection(optional)}
            given[name] = sure or several
        first, *others = given.values() if given else [set()]
        every = set().union(*(roots for each in given.values() for roots in each))
        is_equal = len(given) == len(self.group) and all(each == first for each in others)
        if is_equal and all(len(roots) == 1 for roots in first):
            return every
        if not passed and not every <= {*parameters_of(node)} and (one := self._one_in_a_branch()):
            return one
        if self.caller is not None and every <= set(parameters_of(node)) and self.caller.same(tuple(sorted(every))):
            return every
        if passed:
            raise NotUnderstoodError(f"cross attention: {passed}")
        if every <= set(parameters_of(node)) and self.caller is not None:
            raise NotUnderstoodError(f"nothing shows that {', '.join(sorted(every))} are one tensor", node.lineno)
        texts = ", ".join(
            f"{name} {' or '.join(sorted({each for roots in several for each in roots}))}"
            for name, several in given.items()
        )
        raise NotUnderstoodError(f"they are given different variables: {texts}", self.calls[0].lineno)

    def _one_in_a_branch(self) -> set[str]:
        """The variables that each projection is given in one of the branches."""
        given: dict[tuple[str, ast.AST], set[str]] = {}
        for call in self.calls:
            block = self.around[self._statement(call)]
            given.setdefault((_argument(call).id, block), set()).add(_name(call))
        return {name for (name, _), called in given.items() if called == {*self.group}}

    def _roots(self, call: ast.Call) -> set[str]:
        """The variables whose value its argument may be: that itself, or those that are assigned to it as they are.

        A variable that is assigned something else as well isn't what another one got from it before.
        """
        argument = _argument(call).id
        found, seen, pending = set[str](), set[Any](), [(argument, positions(call)[0])]
        while pending:
            name, end = read = pending.pop()
            if read in seen:
                continue
            seen.add(read)
            before = [
                node for node in self._assigned.get(name, ()) if positions(node)[1] <= end or self._is_again(node)
            ]
            values = [_names_of(_value_of(node), self._reached) for node in before]
            if not values or None in values or name in parameters_of(self.method.node):
                found.add(argument if values else name)
            pending += [
                (each, positions(node)[0]) for node, names in zip(before, values, strict=True) for each in names or ()
            ]
        return found

    # --- what is between them ----------------------------------------------------------------------------------------

    def _between(self, *, is_split: bool) -> Iterator[ast.AST]:
        """What may run after the first call and before the last one.

        By place; and all of a loop that has calls, which run again: but a split in it is computed again as well.
        """
        first, last = self.calls[0], self.calls[-1]
        start, end = positions(first)[1], positions(last)[1]
        again = set(self._ancestors(first)) if is_split else set()
        for loop in self.loops - again:
            start, end = min(start, positions(loop)[0]), max(end, positions(loop)[1])
        containing = set(self._ancestors(last))
        placed = [node for node in self._reached if node is not self.method.node and hasattr(node, "end_lineno")]
        for node in sorted(placed, key=_outer_first):
            if node in self.calls:
                continue
            if isinstance(node, ast.With | ast.Try | ast.Match) and not self._holds_all_or_none(node):
                raise NotUnderstoodError(
                    f"a '{type(node).__name__.lower()}' has some of the projections in it, and others are outside",
                    node.lineno,
                )
            # An expression takes effect where it ends; one that holds the last call does so after it.
            if start < positions(node)[1] <= end and (node not in containing or end > positions(last)[1]):
                yield node
                yield from getattr(node, "generators", ())

    def _holds_all_or_none(self, node: ast.AST) -> bool:
        inside = [call for call in self.calls if node in self._ancestors(call)]
        return len(inside) in (0, len(self.calls))

    def _ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node is not self.method.node:
            node = self.around[node]
            yield node

    # --- how they are written ----------------------------------------------------------------------------------------

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.around[node]
        return node

    def _is_in_one_block(self) -> bool:
        """Whether the calls are in statements of one block, or deeper in those after the first."""
        block = self.around[self._statement(self.calls[0])]
        return all(block in self._ancestors(call) for call in self.calls)

    def _is_straight(self) -> bool:
        """Whether one call before the statement of the first one computes what all calls do."""
        first, statement = self.calls[0], self._statement(self.calls[0])
        if len({_name(call) for call in self.calls}) < len(self.calls):
            return False
        if len({_argument(call).id for call in self.calls}) > 1 or not self._is_in_one_block():
            return False
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
            return False  # in the head of another one
        start = positions(statement)[0]
        if self.method.source.encode().split(b"\n")[start[0] - 1][: start[1]].strip():
            return False  # behind another one in the line
        inner: ast.AST = first
        for node in self._ancestors(first):
            if node is statement:
                break
            if isinstance(node, ast.IfExp) and inner is not node.test:
                return False
            if isinstance(node, ast.BoolOp) and inner is not node.values[0]:
                return False
            inner = node
        before = [
            node
            for node in ast.walk(statement)
            if hasattr(node, "end_lineno") and positions(node)[1] <= positions(first)[0]
        ]
        body = Body(self.method, self.module, tensors=self._given(), parts=self.group, runs=self._before)
        return not any(isinstance(node, ast.NamedExpr) or problem_of(body, node) for node in before)

    # --- what becomes of them ----------------------------------------------------------------------------------------

    def _is_written(self) -> bool:
        """Whether a part may be written into, leaves the method, or has a view that only what is contiguous has."""
        start = positions(self.calls[0])[1]
        body = Body(self.method, self.module, parts=self.group, is_lenient=True)
        reached = [node for node in self._reached if node is not self.method.node and hasattr(node, "end_lineno")]
        behind = [node for node in reached if positions(node)[1] > start]
        if any(problem_of(body, node) and not self._is_apart(node, body) for node in behind):
            return True
        given = [node.value for node in behind if isinstance(node, ast.Return)]
        return any(self._may_be_part(each, body, set()) for each in given)

    def _is_apart(self, node: ast.AST, body: Body) -> bool:
        """Whether a call of another method isn't given any part, or an attribute is set of what is none."""
        match node:
            case ast.Call(func=func) if body.is_own(func):
                return not any(self._may_be_part(each, body, set()) for each in arguments_of(node))
            case ast.Attribute(value=owner):
                return not body.is_own(node) and not self._may_be_part(owner, body, set())
        return False

    def _may_be_part(self, node: ast.AST | None, body: Body, seen: set[str]) -> bool:
        """Whether an expression may be a part, a view of one, or hold one.

        Args:
            seen: the variables that were looked at, each of them once.
        """
        inner: list[Any] = []
        match node:
            case ast.Call() if node in self.calls:
                return True
            case ast.Name(id=name) if name not in seen:
                seen.add(name)
                inner = body.assigned.get(name, [])
            case ast.Tuple(elts=inner) | ast.List(elts=inner) | ast.Dict(values=inner) | ast.BoolOp(values=inner):
                pass
            case ast.IfExp(body=one, orelse=other):
                inner = [one, other]
            case ast.ListComp(elt=one) | ast.Starred(value=one) | ast.Subscript(value=one) | ast.NamedExpr(value=one):
                inner = [one]
            case ast.Attribute(value=one, attr=attr) if attr not in _NO_PART:
                inner = [one]
            case ast.BinOp(left=one, right=other) if _is_listed(one, body) or _is_listed(other, body):
                inner = [one, other]
            case ast.Call(func=ast.Attribute(value=one, attr=attr) as func) if (
                attr in OF_A_TENSOR and body.outside(func) is ... and not body.is_own(func)
            ):
                inner = [one]
            case ast.Call(func=func) if not body.gives_new(node):
                inner = [*arguments_of(node), *([func.value] if isinstance(func, ast.Attribute) else [])]
                inner += body.assigned.get(f"{getattr(func, 'id', '')}()", [])  # of a function that is defined here
        return any(self._may_be_part(each, body, seen) for each in inner)


def _is_listed(node: ast.AST, body: Body) -> bool:
    """Whether an operand is a list or a tuple: a sum or a product of these holds what they hold."""
    made = body.assigned.get(node.id, []) if isinstance(node, ast.Name) else [node]
    return any(isinstance(each, ast.List | ast.Tuple | ast.ListComp) for each in made)


def _outer_first(node: ast.AST) -> tuple[Any, ...]:
    """In the order of the source, what is around another node before it."""
    (line, column), (end_line, end_column) = positions(node)
    return line, column, -end_line, -end_column


def _name(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def _argument(call: ast.Call) -> Any:
    return call.args[0]


def _parents(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            yield child, node


def _assigned_by(node: ast.AST) -> set[str]:
    """The names that a node itself assigns."""
    targets: list[ast.AST] = []
    match node:
        case ast.Assign():
            targets = list(node.targets)
        case ast.AnnAssign(value=ast.expr()) | ast.AugAssign() | ast.NamedExpr() | ast.For() | ast.comprehension():
            targets = [node.target]
        case ast.Delete():
            targets = list(node.targets)
        case ast.With():
            targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    names = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Store | ast.Del)}


def _value_of(node: ast.AST) -> ast.expr | None:
    """What a node assigns to one variable; None if to several, or what isn't an expression of its own."""
    match node:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
            return value
    return None


def _names_of(value: ast.expr | None, reached: Container[ast.AST]) -> list[str] | None:
    """The variables that an expression chooses among, None if it is anything else."""
    match value:
        case ast.Name(id=name):
            return [name]
        case ast.IfExp(body=body, orelse=orelse):
            parts = [_names_of(each, reached) for each in (body, orelse) if each in reached]
        case ast.BoolOp(values=values):
            parts = [_names_of(each, reached) for each in values]
        case _:
            return None
    return None if None in parts else [name for part in parts for name in part or ()]
