"""The identity law: a generated file without patches is the original, but for imports and the header.

Where transformers converts checkpoints of its models, they have one method more, which says that they want that.

    python -m tests.identity              # every modeling file of the installed transformers
    python -m tests.identity --sample 60  # the files that the tests look at
    python -m tests.identity llama xlstm  # some

For each file it compares the text line by line, then imports the original and the generated file, each in a process of
its own (forked from one that has torch loaded, so that it takes a fraction of a second), and compares what they
define. Where the original can't be imported, because a package isn't installed, the generated file must fail alike.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from patcher.codegen import PatchConfig, generate

# Kinds of syntax that a generator gets wrong first; the sample always holds them.
ODD = [
    "auto.modeling_auto",  # nothing but tables, and classes made by calls
    "dinat.modeling_dinat",  # a guard that defines functions
    "encoder_decoder.modeling_encoder_decoder",  # relative imports inside methods
    "falcon.modeling_falcon",  # a guarded relative import
    "gptj.modeling_gptj",
    "llama.modeling_llama",  # bodies that are an ellipsis on the line of the class
    "mra.modeling_mra",  # a relative import inside a function
    "musicgen.modeling_musicgen",  # a relative import under TYPE_CHECKING
    "qwen2_audio.modeling_qwen2_audio",  # a property with a setter
    "rag.modeling_rag",
    "rt_detr.modeling_rt_detr_resnet",  # a relative import inside a docstring
    "udop.modeling_udop",
    "xlstm.modeling_xlstm",  # a class in each branch of an `if`
]


def modeling_modules() -> list[str]:
    """Every `modeling_*.py` of the installed transformers, those outside of `models` included."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    names = [path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("modeling_*.py")]
    return sorted(".".join(parts) for parts in names)


def sample(count: int) -> list[str]:
    """The odd files, filled up with others in an order that depends on nothing but their names."""
    everything = modeling_modules()
    chosen = [name for name in everything if any(name == f"transformers.models.{odd}" for odd in ODD)]
    others = sorted(set(everything) - set(chosen), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return sorted([*chosen, *others[: max(count - len(chosen), 0)]])


#: What the file of a model whose checkpoints transformers converts has at the end of a class, byte for byte.
METHOD = b"""
    @classmethod
    def is_custom_code(cls):
        # transformers converts checkpoints for its own classes only. These read and write the very same ones.
        return False
"""


def methods_of(generated: bytes) -> list[str]:
    """The classes that have the method, by the header."""
    return re.findall(r"^# - add method (\w+)\.is_custom_code\b", generated.decode(), re.MULTILINE)


def without_methods(generated: bytes, names: list[str]) -> bytes:
    """The file without the methods of these classes: each ends with it."""
    lines = generated.split(b"\n")
    classes = {node.name: node for node in ast.walk(ast.parse(generated)) if isinstance(node, ast.ClassDef)}
    for name in names[::-1]:  # the last first, so that lines above keep their numbers
        end = classes[name].end_lineno or 0
        if lines[end - 5 : end] == METHOD.split(b"\n")[:-1]:
            del lines[end - 5 : end]
    return b"\n".join(lines)


def text_problems(original: bytes, generated: bytes) -> list[str]:
    """Lines that differ and are neither the header, nor a relative import, nor the method of a converted model."""
    generated = without_methods(generated, methods_of(generated))
    old, new = original.split(b"\n"), generated.split(b"\n")
    header = len(new) - len(old)
    rule = new[0]
    if header < 3 or not rule.startswith(b"# ---") or new[header - 1] != rule:
        return ["the file doesn't start with a header"]
    relative = {
        node.lineno: node.level
        for node in ast.walk(ast.parse(original))
        if isinstance(node, ast.ImportFrom) and node.level
    }
    problems = [f"line {n} of the header is no comment" for n, line in enumerate(new[:header], 1) if line[:1] != b"#"]
    for number, (was, now) in enumerate(zip(old, new[header:], strict=True), 1):
        if was == now:
            if number in relative:
                problems.append(f"line {number} is still relative: {was!r}")
        elif number not in relative:
            problems.append(f"line {number} changed: {was!r} -> {now!r}")
        elif was.partition(b" import ")[2] != now.partition(b" import ")[2]:
            problems.append(f"line {number} imports something else: {was!r} -> {now!r}")
    return problems


def describe(module: ModuleType) -> dict[str, object]:
    """What a module defines: its names with their kinds, and the members of its own classes."""
    names: dict[str, object] = {"__all__": list(getattr(module, "__all__", []))}
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        names[name] = type(value).__name__
        if isinstance(value, type) and value.__module__ == module.__name__:
            names[name] = [value.__qualname__, sorted(k for k in vars(value) if not k.startswith("_abc"))]
    return names


def converted_models(module: ModuleType) -> list[str]:
    """The models of a module that inherit from none of it, if transformers has conversions for one of its models."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, PreTrainedModel)
    ]
    types = {getattr(getattr(value, "config_class", None), "model_type", None) for value in own}
    known = {key for key in {*types, *(value.__name__ for value in own)} if get_checkpoint_conversion_mapping(key)}
    return [value.__name__ for value in own if known and not any(base in own for base in value.__mro__[1:])]


def method_problems(original: dict[str, Any], added: list[str]) -> list[str]:
    """What is wrong with the methods that a file has more than the original; those are then known of the original."""
    problems = [f"{name} lacks is_custom_code" for name in set(original.get("converted", [])) - set(added)]
    for name in added if "names" in original else ():
        was = original["names"].get(name)
        if not isinstance(was, list):
            problems.append(f"{name}, which has an is_custom_code, is no class of the original")
        else:
            was[1] = sorted([*was[1], "is_custom_code"])
    return problems


def _import_original(name: str, _: str) -> ModuleType:
    return importlib.import_module(name)


def _import_generated(_: str, file: str) -> ModuleType:
    sys.path.insert(0, str(Path(file).parent))
    return importlib.import_module(Path(file).stem)


def in_child(importer: object, name: str, file: str) -> dict[str, Any]:
    """What an import gives, tried in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        said = io.StringIO()
        try:
            with redirect_stdout(said):
                module = importer(name, file)  # type: ignore[operator]
            result: dict[str, object] = {"names": describe(module), "converted": converted_models(module)}
        except BaseException as error:
            result = {"error": type(error).__name__, "message": str(error)[:300]}
        # the path of a file may be part of what transformers prints about it
        result["said"] = sorted(line.split(" in /")[0] for line in said.getvalue().splitlines())
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}


def check(name: str, folder: str) -> tuple[list[str], bool]:
    """The problems of one module, and whether it could be imported at all."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    path = Path(str(spec.origin)).parent.parent / (name.replace(".", "/") + ".py")
    text = generate(PatchConfig(name, "generated.py"))
    problems = text_problems(path.read_bytes(), text.encode())
    file = Path(folder, f"{name.replace('.', '_')}__generated.py")
    file.write_bytes(text.encode())
    original = in_child(_import_original, name, str(file))
    generated = in_child(_import_generated, name, str(file))
    problems += method_problems(original, methods_of(text.encode()))
    if original.get("error") != generated.get("error"):
        problems.append(f"imports as {original.get('error')}, generated as {generated}")
    elif original.get("names") != generated.get("names"):
        problems.append("defines other names")
    if original.get("said") != generated.get("said"):
        problems.append(f"says {original.get('said')}, generated says {generated.get('said')}")
    return problems, "error" not in original


def _check(job: tuple[str, str]) -> tuple[str, list[str], bool]:
    name, folder = job
    try:
        problems, importable = check(name, folder)
    except Exception as error:
        return name, [f"{type(error).__name__}: {error}"], False
    return name, problems, importable


def preload() -> None:
    """Load what nearly every modeling file imports, once."""
    import transformers.modeling_layers
    import transformers.models.auto.modeling_auto
    import transformers.utils.auto_docstring  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of module names")
    parser.add_argument("--sample", type=int, help="look at that many files instead of all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    names = sample(arguments.sample) if arguments.sample else modeling_modules()
    names = [name for name in names if not arguments.names or any(part in name for part in arguments.names)]
    start, bad, importable = time.perf_counter(), 0, 0
    preload()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, folder) for name in names]
        context = multiprocessing.get_context("fork")
        with context.Pool(arguments.jobs) as pool:
            for name, problems, imported in pool.imap_unordered(_check, jobs, chunksize=4):
                importable += imported
                if problems:
                    bad += 1
                    print(f"{name}\n  " + "\n  ".join(problems[:5]))
    seconds = time.perf_counter() - start
    print(f"{len(names) - bad} of {len(names)} hold, {importable} could be imported, {seconds:.0f} s")
    return 1 if bad or not names else 0
