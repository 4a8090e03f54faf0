"""How the calls of projections with the same input are rewritten.

If all calls of a method have the same variable as argument, they are replaced by one call of the joined layer and a
split. Otherwise the rewritten method checks at run time, call by call, whether the argument is the tensor of the first
call: see `patcher.compat.standing_alone`. Both are correct if nothing writes into it between the first and the last
call, which is all that the source is analyzed for.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from patcher.fusions.callers import Caller, uses_as_modules
from patcher.fusions.methods import (
    Method,
    NotUnderstoodError,
    functions_of,
    is_importable,
    located,
    look_up,
    method_to_rewrite,
    nodes_of,
    recorded,
    self_of,
    trees_of,
)
from patcher.fusions.purity import (
    TENSOR_ATTRIBUTES,
    Body,
    arguments_of,
    check,
    is_plain,
    parameters_of,
    positions,
    problem_of,
    shorten,
)
from patcher.source.call_sites import none_by_default

_DEFERRED = ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: Nodes whose code may run several times, or not at once, and what they are called.
_REPEATING = {
    ast.For: "loop",
    ast.While: "loop",
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), "comprehension"),
    **dict.fromkeys((ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "nested function or class"),
}
_INTERNAL = frozenset(vars(nn.Module()))
#: Attributes of tensors that aren't tensors.
_NOT_TENSORS = ("shape", "dtype", "device")
#: A variable, and how many of its assignments are before: 0 for the value that a parameter is given.
Value = tuple[str, int]


@dataclass(frozen=True)
class Form:
    """How one method is rewritten.

    Attributes:
        calls: the indices of the rewritten calls among the calls of its projections, in the order of the source.
        is_split: whether the calls are replaced by one call and a split; otherwise inputs are compared at run time.
        is_copied: whether each part is copied, because it may be modified in place or leave the method.
        checked: conditions on the arguments, as source; if one doesn't hold, the original method is called.
        digest: a hash of the source, to check it when the class is created in another process.
    """

    method: str
    calls: tuple[int, ...]
    is_split: bool
    is_copied: bool
    checked: tuple[str, ...]
    digest: str


def digest_of(method: Method) -> str:
    return hashlib.sha256(ast.dump(method.node).encode()).hexdigest()[:16]


def called_parts(tree: ast.AST, group: Iterable[str], self_name: str = "") -> list[ast.Call]:
    """Return the calls of these children in a method, in the order of the source."""
    self_name = self_name or (self_of(tree) if isinstance(tree, ast.FunctionDef) else "")
    calls = [
        node
        for node in nodes_of(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in group
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == self_name
    ]
    return sorted(calls, key=positions)


def called_with(cls: type[nn.Module], names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the groups of these children that a method calls with the same variable, in the order of the calls."""
    groups: list[tuple[str, ...]] = []
    for tree in trees_of(cls).values():
        #: (variable, number of assignments before the call) -> the children that are called with it
        by_input: dict[tuple[str, int], list[str]] = {}
        for call in called_parts(tree, names):
            if len(call.args) == 1 and isinstance(call.args[0], ast.Name) and not call.keywords:
                name = call.args[0].id
                before = [node for node in nodes_of(tree) if name in _assigned_by(node)]
                input_ = name, sum(positions(node)[1] <= positions(call)[0] for node in before)
                by_input.setdefault(input_, []).append(_called_name(call))
        groups += [tuple(dict.fromkeys(called)) for called in by_input.values() if len(set(called)) > 1]
    return groups


@dataclass(frozen=True, eq=False)
class _Analysis:
    """The result for a module, which applies to identical modules as long as the same is looked up.

    Attributes:
        looked_up: owner, name and object.
        constants: the attributes of the module, and of its caller, whose values the result depends on.
        is_final: whether it would be the same again; code that was run may have failed for a passing reason.
    """

    key: Any
    looked_up: tuple[tuple[Any, str, Any], ...]
    constants: tuple[Mapping[str, Any], Mapping[str, Any]]
    result: tuple[Form, ...] | str
    is_final: bool

    def applies_to(self, module: nn.Module, key: Any, caller: Caller | None) -> bool:
        modules = (module, caller.module if caller is not None else None)
        used = ((vars(owner).get(name), value) for owner, attributes in zip(modules, self.constants, strict=True)
                for name, value in attributes.items())  # fmt: skip
        return self.key == key and all(current == value for current, value in used)


#: Class -> the results for its objects. Only of classes that are never freed, as a result refers to them.
_analyses: dict[type[nn.Module], list[_Analysis]] = {}

#: A module, its projections, and its caller, if that is known.
Candidate = tuple[nn.Module, tuple[str, ...], Caller | None]


def forms_of(candidates: Mapping[str, Candidate]) -> dict[str, tuple[Form, ...] | str]:
    """Return by path how the methods that call the projections of a module are rewritten, or why they can't be.

    Identical modules are analyzed once.
    """
    callers = {path: caller.classes if caller is not None else None for path, (_, _, caller) in candidates.items()}
    result: dict[str, tuple[Form, ...] | str] = {}
    current: dict[type[nn.Module], list[_Analysis]] = {}
    for path, (module, group, caller) in candidates.items():
        cls, key = type(module), (group, _structure(module, group), callers[path])
        if cls not in current:
            analyses = _analyses.get(cls, ())
            current[cls] = [
                entry
                for entry in analyses
                if entry.is_final and all(look_up(*it[:2]) is it[2] for it in entry.looked_up)
            ]
            if is_importable(cls):
                _analyses[cls] = current[cls]
        analysis = next((entry for entry in current[cls] if entry.applies_to(module, key, caller)), None)
        if analysis is None:
            analysis = _analyze(module, group, caller, key)
            current[cls].append(analysis)
        result[path] = analysis.result
    return result


def _analyze(module: nn.Module, group: tuple[str, ...], caller: Caller | None, key: Any) -> _Analysis:
    constants: dict[str, Any] = {}
    result: tuple[Form, ...] | str
    is_final = True
    recorded.entries = {}
    try:
        result = _forms_of(module, group, caller, constants)
        result = (caller.uses_as_modules(group) if caller is not None else "") or result
    except NotUnderstoodError as error:
        result, is_final = str(error), isinstance(error.__cause__, NotUnderstoodError | None)
    finally:
        looked_up = tuple((owner, name, found) for (_, name), (owner, found) in recorded.entries.items())
        recorded.entries = None
    return _Analysis(key, looked_up, (constants, caller.constants if caller is not None else {}), result, is_final)


def _structure(module: nn.Module | None, group: Iterable[str] = ()) -> Any:
    """Return what the analysis of a module depends on, except the values of its attributes."""
    if module is None:
        return None
    attributes = tuple((name, _kind(name, value)) for name, value in vars(module).items() if name not in _INTERNAL)
    tensors = tuple((name, value is None) for name, value in (*module._parameters.items(), *module._buffers.items()))
    children = tuple((name, None if name in group else _structure(child)) for name, child in module._modules.items())
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return type(module), has_hooks, attributes, tensors, children


def _kind(name: str, value: Any) -> Any:
    if callable(value) or name in ("inplace", "max_norm"):
        return value
    return type(value), isinstance(value, list | tuple) and is_plain(value)


def _forms_of(
    module: nn.Module, group: tuple[str, ...], caller: Caller | None, constants: dict[str, Any]
) -> tuple[Form, ...]:
    cls = type(module)
    trees = trees_of(cls)
    if not any({_called_name(call) for call in called_parts(tree, group)} == {*group} for tree in trees.values()):
        for name in functions_of(cls).keys() - trees.keys():
            method_to_rewrite(cls, name)  # raises, as the source can't be read, which may be the reason
        raise NotUnderstoodError(f"no method of {cls.__name__} calls {', '.join(group)} together")
    forms = []
    for name in sorted(name for name, tree in trees.items() if called_parts(tree, group)):
        method = method_to_rewrite(cls, name)
        try:
            calls = _Calls(method, module, group, caller, constants)
            if calls.are_all_called:
                forms.append(calls.form())
            elif alone := sorted({_called_name(call) for call in calls.calls}):
                raise NotUnderstoodError(f"{name} calls {', '.join(alone)} alone", calls.calls[0].lineno)
        except NotUnderstoodError as error:
            raise located(error, method) from error
    if uses := uses_as_modules(cls, group, lambda tree, owner: getattr(owner, "id", None) == self_of(tree)):
        raise NotUnderstoodError(uses)
    if not forms:
        raise NotUnderstoodError(f"{', '.join(group)} are never called together")
    return tuple(forms)


class _Calls:
    """The calls of the projections in one method."""

    def __init__(
        self,
        method: Method,
        module: nn.Module,
        group: tuple[str, ...],
        caller: Caller | None,
        constants: dict[str, Any],
    ) -> None:
        self.method, self.module, self.group, self.caller = method, module, group, caller
        self.parents = dict(_parents_of(method.node))
        self._followed: dict[Any, Any] = {}
        body = self._body()
        body.constants = constants
        self._ruled_out: list[tuple[str, ast.AST]] = []
        self._reached = dict.fromkeys(body.reached(self._ruled_out))
        self.calls = [call for call in called_parts(method.node, group) if call in self._reached]
        self.are_all_called = {_called_name(call) for call in self.calls} == {*group}

    def _body(self, values: Iterable[str] = (), **options: Any) -> Body:
        return Body(self.method, self.module, values, cache=self._followed, **options)

    def form(self) -> Form:
        for call in self.calls:
            self._check_call(call)
        #: the nodes that may run until the last call, which determine the variables between the calls
        last = positions(self.calls[-1])[1]
        self._nodes = [node for node in self._reached if not hasattr(node, "end_lineno") or positions(node)[0] <= last]
        self._assigned: dict[str, list[ast.AST]] = {}
        containing = set(self._ancestors(self.calls[-1]))
        for node in self._nodes:
            for name in _assigned_by(node) if node not in containing else ():
                self._assigned.setdefault(name, []).append(node)
        roots = self._shared_roots()
        is_split = self._is_straight()
        region = list(self._between())
        for node in nodes_of(self.method.node):  # what is defined before may run between the calls
            if node is self.method.node or not isinstance(node, _DEFERRED | ast.GeneratorExp):
                continue
            if positions(node)[0] < last:
                region += [node] if isinstance(node, _DEFERRED) else [*nodes_of(node)[1:]]
        try:
            required = self._required_values(region)
        except NotUnderstoodError as error:
            raise NotUnderstoodError(f"between the projections: {error}", error.line) from error
        self._check_assigned(region, roots, is_split=is_split)
        conditions = [text for text, node in self._ruled_out if self._is_relevant(node, roots)]
        if required:
            conditions.append(f"{self_of(self.method.node)}.are_values({', '.join(required)})")
        all_calls = called_parts(self.method.node, self.group)
        return Form(
            self.method.name,
            calls=tuple(index for index, call in enumerate(all_calls) if call in self.calls),
            is_split=is_split,
            is_copied=self._is_written(),
            checked=tuple(dict.fromkeys(conditions)),
            digest=digest_of(self.method),
        )

    def _required_values(self, region: list[ast.AST]) -> list[str]:
        """Return the parameters that must be values, so that nothing writes between the calls.

        Raises:
            NotUnderstoodError: something may write there in any case.
        """
        tensors = self._inputs()
        options: Any = {"tensors": tensors, "parts": self.group, "runs": self._nodes}

        def check_with(values: Iterable[str]) -> None:
            check(self._body(values, **options), region)

        names: list[str] = []
        try:
            check_with(names)
        except NotUnderstoodError:
            names = [name for name in parameters_of(self.method.node)[1:] if name not in tensors]
            check_with(names)
            for name in names.copy():  # keep those that are necessary
                try:
                    check_with({*names} - {name})
                    names.remove(name)
                except NotUnderstoodError:
                    continue
        return names

    def _inputs(self) -> set[str]:
        """Return the variables that are tensors between the calls: what they get, and what is assigned to that.

        What is assigned again may be anything then.
        """
        start, roots = positions(self.calls[0])[0], set[Value]().union(*map(self._roots, self.calls))
        names = {_argument_of(call).id for call in self.calls}
        for name, nodes in self._assigned.items():
            if any(positions(node)[1] > start for node in nodes):
                names.discard(name)
        return names | {name for name, count in roots if not count and name not in self._assigned}

    def _check_assigned(self, region: list[ast.AST], roots: set[str], *, is_split: bool) -> None:
        """Raise if the variable of a later call is assigned between the calls."""
        for call in self.calls[1:]:
            name = _argument_of(call).id
            if name not in roots and not is_split:
                continue
            for node in region:
                if name in _assigned_by(node) and positions(node)[1] <= positions(call)[0]:
                    raise NotUnderstoodError(f"{name} is assigned between the projections", positions(node)[0][0])

    # --- branches ----------------------------------------------------------------------------------------------------

    def _is_relevant(self, branch: ast.AST, roots: set[str]) -> bool:
        """Whether the form would be wrong if a branch that was ruled out ran."""
        first, last = positions(self.calls[0]), positions(self.calls[-1])
        if called_parts(branch, self.group, self_of(self.method.node)):
            return True
        start, end = positions(branch)
        names = {_argument_of(call).id for call in self.calls} | roots
        is_between = first[0] < end and start < last[1]
        return is_between or (start < last[1] and any(_assigned_by(node) & names for node in ast.walk(branch)))

    # --- inputs ------------------------------------------------------------------------------------------------------

    def _check_call(self, call: ast.Call) -> None:
        name = _called_name(call)
        if call.keywords or [type(argument) for argument in call.args] != [ast.Name]:
            raise NotUnderstoodError(f"{shorten(call)!r} passes something other than one variable", call.lineno)
        for node in self._ancestors(call):
            if type(node) in _REPEATING and node is not self.method.node:
                raise NotUnderstoodError(f"{name} is called in a {_REPEATING[type(node)]}", call.lineno)

    def _shared_roots(self) -> set[str]:
        """Return the variables whose values the projections get.

        The inputs are compared at run time. Here they only have to be likely the same tensor, as rows are computed in
        vain otherwise.

        Raises:
            NotUnderstoodError: they are different variables, or the caller passes another input for some projections.
        """
        node, passed, given = self.method.node, "", dict[str, None]()
        names = {_argument_of(call).id for call in self.calls}
        if len(names) == 1:
            return names
        optional = none_by_default(node)
        #: projection -> the values that each of its calls may get
        inputs: dict[str, set[frozenset[Value]]] = {}
        for call in self.calls:
            roots = self._roots(call)
            for name in sorted({name for name, _ in roots}.intersection(optional)):
                if self.caller is None and len(roots) == 1:
                    continue  # the caller isn't known
                passed_input = self.caller.passes(name) if self.caller is not None else ""
                roots = roots if passed_input else {root for root in roots if root[0] != name}
                passed = passed or passed_input
            if roots:  # otherwise the call doesn't run
                inputs.setdefault(_called_name(call), set()).add(frozenset(roots))
                given[f"{_called_name(call)} {_argument_of(call).id}"] = None
        for name, alternatives in inputs.items() if self.caller is None else ():
            unconditional = {roots for roots in alternatives if not {name for name, _ in roots}.intersection(optional)}
            inputs[name] = unconditional or alternatives
        expected, *others = inputs.values() if inputs else [set()]
        values = [set[Value]().union(*alternatives) for alternatives in inputs.values()]
        variables = [{name for name, _ in roots} for roots in values]
        sources = set[str]().union(*variables)
        is_equal = len(inputs) == len(self.group) and all(alternatives == expected for alternatives in others)
        if is_equal and all(len(roots) == 1 for roots in expected):
            return sources
        are_parameters = set[Value]().union(*values) <= {(name, 0) for name in parameters_of(node)}
        if not passed and not are_parameters and (names := self._inputs_in_a_branch()):
            return names
        if are_parameters and self.caller is not None and self.caller.same(tuple(sorted(sources))):
            return sources
        if passed and any(names != variables[0] for names in variables):
            raise NotUnderstoodError(f"cross attention: {passed}")
        if are_parameters and self.caller is not None:
            raise NotUnderstoodError(f"nothing shows that {', '.join(sorted(sources))} are one tensor", node.lineno)
        raise NotUnderstoodError(f"they are given different variables: {', '.join(given)}", self.calls[0].lineno)

    def _inputs_in_a_branch(self) -> set[str]:
        """Return the variables that all projections get in one of the branches."""
        by_input: dict[tuple[str, ast.AST], set[str]] = {}
        for call in self.calls:
            block = self.parents[self._statement(call)]
            by_input.setdefault((_argument_of(call).id, block), set()).add(_called_name(call))
        return {name for (name, _), called in by_input.items() if called == {*self.group}}

    def _roots(self, call: ast.Call) -> set[Value]:
        """Return the values that the argument may have, followed through assignments of one variable to another."""
        roots, seen, pending = set[Value](), set[Any](), [(_argument_of(call).id, positions(call)[0])]
        while pending:
            name, end = entry = pending.pop()
            if entry in seen:
                continue
            seen.add(entry)
            assignments = [node for node in self._assigned.get(name, ()) if positions(node)[1] <= end]
            values = [_names_of(_value_of(node), self._reached) for node in assignments]
            if None in values or not values or name in parameters_of(self.method.node):
                roots.add((name, len(values) if None in values else 0))
            for node, names in zip(assignments, values, strict=True):
                pending += [(source, positions(node)[0]) for source in names or ()]
        return roots

    # --- between the calls -------------------------------------------------------------------------------------------

    def _between(self) -> Iterator[ast.AST]:
        """Yield the nodes that may run after the first call and before the last one."""
        start, end = positions(self.calls[0])[1], positions(self.calls[-1])[1]
        containing = set(self._ancestors(self.calls[-1]))
        placed = [node for node in self._reached if node is not self.method.node and hasattr(node, "end_lineno")]
        for node in sorted(placed, key=_outer_first):
            if node in self.calls:
                continue
            begin, finish = positions(node)
            if isinstance(node, ast.With | ast.Try | ast.Match):  # it takes effect where it begins and where it ends
                is_between = start < begin < end or start <= finish < end
            else:  # an expression takes effect where it ends, so one around the last call does so after it
                is_between = start < finish <= end and node not in containing
            if is_between:
                yield node
                yield from getattr(node, "generators", ())

    def _ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node is not self.method.node:
            node = self.parents[node]
            yield node

    # --- statements --------------------------------------------------------------------------------------------------

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def _is_straight(self) -> bool:
        """Whether one call before the statement of the first call can replace all calls."""
        first, statement = self.calls[0], self._statement(self.calls[0])
        if len({_called_name(call) for call in self.calls}) < len(self.calls):
            return False
        block = self.parents[statement]  # all calls are in it, or in blocks nested in it
        if len({_argument_of(call).id for call in self.calls}) > 1:
            return False
        if not all(block in self._ancestors(call) for call in self.calls):
            return False
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
            return False  # in the head of a compound statement
        start = positions(statement)[0]
        if self.method.source.encode().split(b"\n")[start[0] - 1][: start[1]].strip():
            return False  # after another statement in the same line
        if any(isinstance(node, ast.IfExp | ast.BoolOp) and first in nodes_of(node) for node in nodes_of(statement)):
            return False
        placed = (node for node in nodes_of(statement) if hasattr(node, "end_lineno"))
        before = [node for node in placed if positions(node)[1] <= positions(first)[0]]
        body = self._body(tensors=self._inputs(), parts=self.group, runs=self._nodes)
        return not any(isinstance(node, ast.NamedExpr) or problem_of(body, node) for node in before)

    # --- results -----------------------------------------------------------------------------------------------------

    def _is_written(self) -> bool:
        """Whether a part may be modified in place, leaves the method, or gets a view that must be contiguous."""
        start = positions(self.calls[0])[1]
        body = Body(self.method, self.module, parts=self.group, is_lenient=True)
        reached = [node for node in self._reached if node is not self.method.node and hasattr(node, "end_lineno")]
        later = [node for node in reached if positions(node)[1] > start]
        if any(problem_of(body, node) and not self._gets_no_part(node, body) for node in later):
            return True
        results = [node.value for node in later if isinstance(node, ast.Return)]
        return any(self._may_be_part(result, body, set()) for result in results)

    def _gets_no_part(self, node: ast.AST, body: Body) -> bool:
        """Whether a call of another method gets no part, or an attribute of an object that isn't a part is set."""
        match node:
            case ast.Call(func=func) if body.is_self_attr(func):
                return not any(self._may_be_part(argument, body, set()) for argument in arguments_of(node))
            case ast.Attribute(value=owner):
                return not body.is_self_attr(node) and not self._may_be_part(owner, body, set())
        return False

    def _may_be_part(self, node: ast.AST | None, body: Body, seen: set[str]) -> bool:
        """Whether an expression may be a part, a view of one, or contain one.

        Args:
            seen: the variables that were followed already.
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
            case ast.Attribute(value=one, attr=attr) if attr not in _NOT_TENSORS:
                inner = [one]
            case ast.BinOp(left=one, right=other) if _is_list(one, body) or _is_list(other, body):
                inner = [one, other]
            case ast.Call(func=ast.Attribute(value=one, attr=attr) as func) if (
                attr in TENSOR_ATTRIBUTES and body.resolve(func) is ... and not body.is_self_attr(func)
            ):
                inner = [one]
            case ast.Call(func=func) if not body.gives_new(node):
                inner = [*arguments_of(node), *([func.value] if isinstance(func, ast.Attribute) else [])]
        return any(self._may_be_part(child, body, seen) for child in inner)


def _is_list(node: ast.AST, body: Body) -> bool:
    """Whether an operand is a list or a tuple: their sums and products contain the same elements."""
    expressions = body.assigned.get(node.id, []) if isinstance(node, ast.Name) else [node]
    return any(isinstance(expression, ast.List | ast.Tuple | ast.ListComp) for expression in expressions)


def _outer_first(node: ast.AST) -> tuple[Any, ...]:
    """Sort key: the order of the source, outer nodes before inner ones."""
    (line, column), (end_line, end_column) = positions(node)
    return line, column, -end_line, -end_column


def _called_name(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def _argument_of(call: ast.Call) -> Any:
    return call.args[0]


def _parents_of(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in nodes_of(tree):
        for child in ast.iter_child_nodes(node):
            yield child, node


def _assigned_by(node: ast.AST) -> set[str]:
    """Return the names that a node assigns, without its children."""
    targets: list[Any] = [*getattr(node, "targets", ()), getattr(node, "target", None)]
    targets += [item.optional_vars for item in getattr(node, "items", ())]
    names = (name for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store | ast.Del)}


def _value_of(node: ast.AST) -> ast.expr | None:
    """Return the expression that a node assigns to a single variable, if it does."""
    match node:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
            return value
    return None


def _names_of(value: ast.expr | None, reached: Container[ast.AST]) -> list[str] | None:
    """Return the variables among which an expression chooses, None if it is anything else."""
    match value:
        case ast.Name(id=name):
            return [name]
        case ast.IfExp(body=body, orelse=orelse):
            parts = [_names_of(expression, reached) for expression in (body, orelse) if expression in reached]
        case ast.BoolOp(values=values):
            parts = [_names_of(expression, reached) for expression in values]
        case _:
            return None
    return None if None in parts else [name for part in parts for name in part or ()]
