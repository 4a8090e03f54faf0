"""The advice of every error is executed by a test, and arrives.

Advice is every text of the package that tells the reader to do something: in messages, in what commands print, and in
generated files. Each must stand above a case of the tables in `advice/`, which raises the error for real and does what
it says, or be listed below with the reason why it can't. Words that are no advice are listed too, and whole.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.project.advice import (
    CASES,
    Place,
    adapters,
    applying,
    checkpoints,
    construction,
    families,
    functions,
    generated_files,
    generated_models,
    generated_names,
    generated_objects,
    generated_projects,
    generated_sources,
    loads,
    models,
    new_weights,
    packages,
    parallel,
    state_dicts,
    streaming,
    trainers,
    training,
    values,
)
from tests.support import shared
from tests.support.imports import trees_of
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config

ROOT = Path(__file__).parents[2]
TABLES = (
    values,
    functions,
    families,
    packages,
    loads,
    applying,
    state_dicts,
    streaming,
    new_weights,
    models,
    checkpoints,
    construction,
    parallel,
    trainers,
    generated_files,
    generated_names,
    generated_sources,
    generated_projects,
    generated_models,
    generated_objects,
    training,
    adapters,
)

#: How advice begins, behind the end of a sentence or of a part of one.
VERBS = """
    add ask assign bind call cast change check combine convert correct declare define delete derive download express
    fetch fuse generate give import install keep leave load look make move name narrow pass pickle push put
    remove rename replace restrict run save say see set show start take use write
""".split()
ADVICE = re.compile(rf"(?:^ ?|[.;:,] |\n|\bor )(?:{'|'.join(VERBS)})\b(?! for)", re.IGNORECASE)

#: Texts that only look like advice.
NO_ADVICE = {
    "Write JSON to stdout, and nothing else.": "help of an option",
    "Run code from the repo.": "help of an option",
    "call {} ({}), ": "the name of an output",
    "Run only this stage, such as training or save": "help of an option",
    "import {}{}": "code that is generated",
    "add `{}`": "what a model card says",
    "Push it to this repo on the hub, which is created if needed.": "help of an option",
    "Generate from every config of the project.": "help of an option",
    "Show what would change; write nothing.": "help of an option",
    "With --check: write the files that aren't up to date.": "help of an option",
    "Take a tenth of the time: find wrong weights, but not what only some inputs show.": "help of an option",
    "Write nothing; exit with 1 and a diff if a file isn't up to date.": "help of an option",
    "leave as it is": "the state of a file",
    "replace class": "a word of a header",
    "replace function": "a word of a header",
    "add helper": "a word of a header",
    "add method": "a word of a header",
    "add code behind the imports": "a line of a header",
    "add import": "a word of a header",
    "add base": "a word of a header",
    "leave out": "a word of a header",
}
#: Advice that no case can execute here.
NOT_HERE = {
    ". Load it whole, or load the original model.": "done in tests/codegen/test_standing_alone",
    "Load the model again with the patcher that it is to have.": "done in tests/loading/test_apply_keeps",
    "{} {}: load another model of this file, or the original one.": "done in tests/codegen/test_standing_alone",
    "keep the checkpoint in full precision, and quantize it at each load": "done in tests/loading/test_giving_back",
    "Load the model, and write it with save_pretrained first.": "done in tests/test_publishing",
    "is for a layer of the original model only: load it into that.": "done in tests/codegen/test_standing_alone",
    "no round was finished; give it more time: seconds={}": "no error: tests/verification/test_benchmark",
    "Install a release of {} that patcher's metadata lists": "one release is installed",
    "Install them: pip install liger-kernel": "tests install nothing",
    "formatting needs ruff, which is not installed. Run `pip install ruff`.": "tests install nothing",
    "GENERATED FILE: change the {} that it is made from, not this file.": "no error: tests/codegen/test_checker",
    "Use it where there is one, or load without it.": "of kernels: needs a machine with, and one without a GPU",
    "and nothing may be fetched (offline). Pass a folder, or a config.": "needs a hub: tests/inspection/test_planning",
    "Leave it out of the fusion: its modules=... say which it takes.": "done in tests/fusions/test_own_families",
    "The layouts take parameters of {} and leave {}. Say what these become": "done in tests/fusions/test_own_families",
    "Load it with the releases that have saved it": "one release is installed",
    "Download the repo, and pass the folder.": "needs a hub: tests/inspection/test_planning",
    "A folder can be passed instead of a repo. All commands: patcher --help": "each is run: tests/cli/test_cli",
    "Name them in tp_plan.": "of transformers before 5.19: tests/distributed/test_tensor_parallel",
    "it, without the other patches. Derive it from {}, imported by that name.": "done in tests/codegen/test_what_runs",
    "a name in an f-string, has to be written differently.": "done in tests/codegen/test_renaming",
    "give the class itself as the replacement, derived from what it replaces": "done in tests/spec/test_forward_of",
    "whose place it is to run. Give it the parameters of that one.": "done in tests/spec/test_forward_of",
    "Have it read what the original has": "done in tests/spec/test_forward_of",
    "it can't train. For inference call model.eval()": "done in tests/spec/test_forward_of",
    "that its module has, or a name; write like(": "done in tests/spec/test_like",
    "begins. Correct it, or write like('module:{}')": "done in tests/spec/test_like",
    "by the patcher: class_mapping={{}: ...}, with a class of that layout": "done in tests/libraries/use_kernels",
    "Run the forward again for each, or load without the preset LIGER.": "done in tests/libraries/liger_on_cpu",
    "which a file can't refuse. Load with the patcher itself.": "done in tests/codegen/test_from_patcher",
    "; give model_config= (--model-config FOLDER)": "done in tests/verification/test_generated_files",
    "for a config, write verify(config, patcher).": "done in tests/verification/test_verification",
    "name others, or none, for all.": "done in tests/verification/test_verification",
    "write benchmark(..., inputs={...})": "no model is known for which nothing is found that it runs on",
    "never lie beside others. Save them into a folder, and upload that": "needs a hub",
}


@cache
def texts() -> dict[str, str]:
    """Every text of the package that gives advice, with `{}` for what is filled in, and where it is."""
    found = {}
    for path, tree in trees_of(ROOT / "patcher").items():
        apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                apart.update(map(id, node.values))
        for node in ast.walk(tree):
            text = text_of(node) if id(node) not in apart else ""
            if " " in text and ADVICE.search(text):
                found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
    return found


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def test_every_advice_is_executed_by_a_case() -> None:
    """Words that are no advice are exempt only where they are the whole text."""
    known = [*NOT_HERE, *(text for listed, *_ in CASES.values() for text in listed)]
    assert len(texts()) > 200
    left = {where: text for text, where in texts().items() if text not in NO_ADVICE}
    assert {where: text for where, text in left.items() if not any(each in text for each in known)} == {}


def test_every_case_and_every_exception_is_of_an_advice_that_there_is() -> None:
    known = [*NO_ADVICE, *NOT_HERE, *(text for listed, *_ in CASES.values() for text in listed)]
    every = [text_of(node) for tree in trees_of(ROOT / "patcher").values() for node in ast.walk(tree)]
    assert [each for each in known if not any(each in text for text in every)] == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())


@pytest.mark.parametrize("name", CASES)
def test_what_an_error_says_to_write_works(name: str, llama: Path, moe: Path, tmp_path: Path) -> None:
    listed, function, error = CASES[name]
    steps = function(Place(llama, moe, tmp_path))
    wrong, said = next(steps), []
    while True:
        with pytest.raises(error) as caught:
            wrong()
        said.append(str(caught.value))
        try:
            wrong = steps.send(said[-1])
        except StopIteration:
            break
    for text in listed:
        pattern = re.escape(text).replace(r"\{\}", "(?s:.*)")
        assert any(re.search(pattern, each) for each in said), (text, said)
