"""What a loop over experts leaves behind of each: rows that it adds to what the forward returns, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patcher.fusions.methods import NotUnderstoodError


def check_effects(function: ast.FunctionDef, loop: ast.For) -> None:
    """See to it that what the body computes is of one expert and used up in it, but for rows that are added.

    An expert that is visited without tokens then changes nothing.

    Raises:
        NotUnderstoodError: something may go on to the next expert, or beyond the loop.
    """
    assert isinstance(loop.target, ast.Name)
    stored = {name for statement in loop.body for name in _stored(statement)} | {loop.target.id}
    within = {id(node) for node in ast.walk(loop)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in stored and id(node) not in within and node.lineno > loop.lineno:
            raise NotUnderstoodError(f"{node.id} is used after the loop over the experts", node.lineno)
    _definite(loop.body, {loop.target.id}, stored)


def _definite(statements: Sequence[ast.stmt], have: set[str], stored: set[str]) -> set[str]:
    """The variables of the body that have values of this expert behind some statements."""
    for statement in statements:
        looked: ast.AST = statement
        match statement:
            case ast.If():
                looked = statement.test
            case ast.Assign(targets=[ast.Name() | ast.Tuple()]) | ast.Continue() | ast.Pass():
                pass
            case ast.AugAssign(target=ast.Name(id=name)) if name in have:
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="index_add_"))):
                pass
            case _:
                raise NotUnderstoodError("the loop over the experts does something that isn't known", statement.lineno)
        for node in ast.walk(looked):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in stored - have:
                raise NotUnderstoodError(f"{node.id} may be what another expert left", node.lineno)
        if isinstance(statement, ast.If):
            yes, no = (_definite(body, set(have), stored) for body in (statement.body, statement.orelse))
            have = no if isinstance(statement.body[-1], ast.Continue) else yes & no
        else:
            have = have | _stored(statement)
    return have


def _stored(statement: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
