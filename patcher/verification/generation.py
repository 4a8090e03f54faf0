"""Greedy generation, token by token beside stock's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patcher.verification.comparing import Pair, Stage, UncheckedError, said
from patcher.verification.passes import Pass, fitted

NEW_TOKENS = 5


def generation_stage(pair: Pair, passes: Iterable[Pass], tolerance: float) -> Stage:
    """Let both go on with these texts; where two tokens are equally likely for stock, either is right."""
    if not pair.stock.can_generate():
        raise UncheckedError("the model generates nothing from text")
    equal = total = 0
    told = ""
    for one in passes:
        names = one.arguments.keys() & {"input_ids", "attention_mask"}
        arguments: dict[str, Any] = {name: fitted(one.arguments, pair.stock)[name] for name in names}
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_scores": True}
        options |= {"return_dict_in_generate": True, "eos_token_id": None, "disable_compile": True}
        try:
            expected = pair.stock.generate(**arguments, **options)
        except Exception as error:
            raise UncheckedError(f"stock raises {said(error)}") from None
        found = pair.ours.generate(**arguments, **options)
        tokens = [sequence.sequences[:, -len(sequence.scores) :] for sequence in (expected, found)]
        if tokens[0].shape != tokens[1].shape:
            shapes = tuple(tokens[1].shape), tuple(tokens[0].shape)
            message = f"on {one.name} the shape of the new tokens is {shapes[0]} where stock has {shapes[1]}"
            return Stage("generation", False, message=message)
        for row in range(len(tokens[0])):
            count = tokens[0].shape[1]
            same = int((tokens[0][row] == tokens[1][row]).long().cumprod(0).sum())
            equal, total = equal + same, total + count
            if same == count:
                continue
            best = expected.scores[same][row].float().topk(2).values
            margin, noise = float(best[0] - best[1]), 2 * tolerance * max(1.0, float(best[0].abs()))
            if margin > noise:
                message = f"on {one.name} token {same + 1} of {count} is another, which stock prefers by {margin:.3g}"
                return Stage("generation", False, _figures(equal, total), message=message)
            told = f"then two tokens are equally likely (by {margin:.1g})"
    if not total:
        raise UncheckedError("the model generates nothing from text")
    return Stage("generation", True, _figures(equal, total), message=told)


def _figures(equal: int, total: int) -> tuple[tuple[str, float], ...]:
    return ("tokens equal", float(equal)), ("of", float(total))
