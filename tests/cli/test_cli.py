"""The `patcher` command: what it says, where, and how it exits."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from patcher.cli import app
from tests.support import fresh, shared

CONFIG = """
from patcher.codegen import PatchConfig

config = PatchConfig("transformers.models.llama.modeling_llama", "patched.py")
config.replace_function("rotate_half", "def rotate_half(x):\\n    return x\\n")
"""
COMMANDS = ["presets", "plan", "verify", "bench", "diff", "export", "codegen"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def said(done: Any) -> str:
    """What a user reads, whatever a library writes there besides."""
    return "".join(re.findall(r"^error: .*(?:\n(?!\s*$).*)*", done.stderr, re.MULTILINE))


def test_codegen_is_a_command_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_patch_gen_config.py").write_text(CONFIG)
    (tmp_path / "pyproject.toml").write_text('[tool.patcher.codegen]\nsearch_root = "."\n')
    done = CliRunner().invoke(app, ["codegen", "llama_patch_gen_config.py", "--diff"])
    assert done.exit_code == 0, done.output
    assert "def rotate_half(x):\n    return x\n" in (tmp_path / "generated" / "patched.py").read_text()
    assert CliRunner().invoke(app, ["codegen", "--check"]).exit_code == 0
    assert "patched.py, 1 patch" in CliRunner().invoke(app, ["codegen", "--list"]).output


# --- how it starts -------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("arguments", [[], ["--help"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['patcher', *{arguments!r}]\n"
        "from patcher.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leaving:\n    assert not leaving.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("Usage: patcher" if arguments else "  patcher plan ") in done.stdout


def test_help_names_every_command_and_says_all_of_what_it_does() -> None:
    assert "Exits with 1 if a problem was found" in " ".join(run("plan", "--help").output.split())
    text = run("--help").output
    for command in COMMANDS:
        (line,) = re.findall(rf"^  {command} .*", text, re.MULTILINE)
        assert line.endswith("."), line
        assert "..." not in line


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_it(shell: str) -> None:
    environment = os.environ | {"_PATCHER_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-c", "from patcher.cli import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "_PATCHER_COMPLETE" in done.stdout, done.stderr
    assert done.returncode == 0


@pytest.mark.usefixtures("mine")
def test_the_first_screen_is_of_commands_that_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "my_patches.py").write_text(MINE + "\nPATCHER, MyNorm = DOUBLED, Norm\n")
    (tmp_path / "my_patch_gen_config.py").write_text(CONFIG)
    (tmp_path / "pyproject.toml").write_text('[tool.patcher.codegen]\nsearch_root = "."\n')
    shown = run()
    commands = re.findall(r"^  patcher (.*)", shown.output, re.MULTILINE)

    assert shown.exit_code == 0
    assert {command.split()[0] for command in commands} == set(COMMANDS)
    assert 5 <= len(commands) <= 9
    for command in commands:
        quicker = ["--seconds", "5", "--measure", "load"] if command.startswith("bench") else []
        done = run(*shlex.split(command.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(folder))), *quicker)
        assert done.exit_code == 0, f"{command}\n{done.output}"


# --- a model -------------------------------------------------------------------------------------------------------

MINE = """
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from patcher import Patcher

class Doubled(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)

class Unfit(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.other = nn.Linear(2, 2)
    def forward(self, x):
        return x

class Same(LlamaMLP):
    pass

class Norm(LlamaRMSNorm):
    pass

class Forward(nn.Module):
    def forward(self, hidden_states):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

def turn(x):
    return x

DOUBLED = Patcher({"LlamaMLP": Doubled}, name="doubled")
SAME = Patcher({"LlamaMLP": Same}, fingerprints={"LlamaMLP": "0" * 16})
UNFIT = Patcher({"LlamaMLP": Unfit})
MISSPELT = Patcher({"LlamaMPL": Doubled})
DRIFTED = DOUBLED.replace(fingerprints={"LlamaMLP": "0" * 16})
NUMBER = 3
print("said while it is imported")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny import tiny_llama_config

    return shared.checkpoint(tiny_llama_config())


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of patchers in the current folder."""
    (tmp_path / "my_patches.py").write_text(MINE)
    (tmp_path / "broken_patches.py").write_text("raise KeyError('half done')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ("my_patches", "broken_patches")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield "my_patches"
    for name in names:  # or another test finds what was imported here
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--fusion", "qkv", "--fusion", "gate_up"], 0),
        (["--patcher", "my_patches:DOUBLED", "--fusion", "qkv"], 0),
        (["--patcher", "my_patches:UNFIT"], 1),
        (["--patcher", "my_patches:MISSPELT"], 1),
    ],
    ids=["fusions", "both", "unfit", "misspelt"],
)
def test_plan_exits_with_what_the_load_would_do(folder: Path, options: list[str], code: int) -> None:
    done = run("plan", folder, *options)
    assert done.exit_code == code, done.output
    assert "LlamaForCausalLM: " in done.stdout.splitlines()[0]
    assert ("Problems" in done.stdout) == bool(code)
    told = run("plan", folder, *options, "--json")
    assert told.exit_code == code
    data = json.loads(told.stdout)  # the print of the module is not there
    assert data["ok"] == (code == 0)
    assert (
        len(data["fused"]) + len(data["replaced"]) == {"--fusion": 4, "--patcher": 4 if not code else 2}[options[0]]
        or code
    )


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("option", "entry", "field", "replaced"),
    [
        ("--class", "LlamaRMSNorm=my_patches:Norm", "class_mapping", 5),
        ("--class", "^(?=Llama).*Norm$=my_patches:Norm", "class_mapping", 5),
        ("--class", "like:MistralRMSNorm=my_patches:Norm", "class_mapping", 5),
        ("--class", "like:MistralRMSNorm=forward_of:my_patches:Forward", "class_mapping", 5),
        ("--module", "model.layers.{0..1}.input_layernorm=my_patches:Norm", "module_mapping", 2),
        ("--function", "rotate_half=my_patches:turn", "function_mapping", 0),
    ],
)
def test_an_entry_of_a_mapping(folder: Path, option: str, entry: str, field: str, replaced: int) -> None:
    done = run("plan", folder, option, entry, "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert [rule.partition("[")[0] for rule, _ in data["rules"]] == [field]
    assert (len(data["replaced"]), len(data["functions"])) == (replaced, not replaced)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--fusion", "qkv", "--dtype", "bfloat16"], 0),
        (["--fusion", "qkv", "--quick"], 0),
        (["--fusion", "qkv", "--stage", "save", "--stage", "reload"], 0),
        (["--patcher", "my_patches:DOUBLED"], 1),
        (["--patcher", "my_patches:UNFIT"], 1),
    ],
    ids=["right", "quick", "stages", "wrong", "unfit"],
)
def test_verify_exits_with_whether_it_computes_the_same(folder: Path, options: list[str], code: int) -> None:
    done = run("verify", folder, *options, "--json")
    assert done.exit_code == code, done.output
    if options[-1] != "my_patches:UNFIT":
        assert json.loads(done.stdout)["passed"] == (code == 0)


@pytest.mark.usefixtures("mine")
def test_bench_measures_what_the_options_name_and_their_subsets(folder: Path) -> None:
    options = ["--fusion", "qkv", "--class", "LlamaMLP=my_patches:Doubled", "--seconds", "4", "--measure", "forward"]
    done = run("bench", folder, *options, "--measure", "prefill", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [each["patcher"] for each in found["measured"]] == ["Patcher(fusions=['qkv'])"]
    assert "differs from stock" in found["left_out"][0]["why"]
    assert {name.split(",")[0] for name in found["stock"]} == {"prefill"}

    done = run("bench", folder, "--class", "LlamaMLP=my_patches:Doubled", "--seconds", "2", "--no-verify")
    assert done.exit_code == 0, done.output
    assert "Time, or memory, as a share of stock's" in done.stdout
    done = run("bench", folder, "--class", "LlamaMLP=my_patches:Doubled", "--seconds", "1")
    assert done.exit_code == 1
    assert "Not measured" in done.stdout


@pytest.mark.usefixtures("mine")
def test_a_preset_that_drifted_is_tried_without_its_pins(folder: Path) -> None:
    for command in ("plan", "verify"):
        told = json.loads(run(command, folder, "--patcher", "my_patches:DRIFTED", "--json").stdout)
        assert "`patcher verify MODEL --preset NAME --unpinned`" in json.dumps(told)
    done = run("plan", folder, "--patcher", "my_patches:DRIFTED", "--unpinned", "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (0, True)


@pytest.mark.usefixtures("mine")
def test_diff_shows_the_code_and_exits_with_1_if_a_load_would_fail(folder: Path) -> None:
    done = run("diff", folder, "--patcher", "my_patches:DOUBLED", "--fusion", "qkv")
    assert done.exit_code == 0, done.output
    assert "+++ my_patches.Doubled\n" in done.stdout
    assert "+        return 2 * super().forward(x)\n" in done.stdout
    assert "fused by 'qkv'" in done.stdout
    assert "\x1b" not in done.stdout
    data = json.loads(run("diff", folder, "--patcher", "my_patches:DOUBLED", "--json").stdout)
    assert [entry["becomes"] for entry in data["classes"]] == ["my_patches.Doubled"]
    done = run("diff", folder, "--class", "LlamaMlp=my_patches:Doubled")
    assert done.exit_code == 1
    assert "#   class_mapping: no class of the model matches 'LlamaMlp'; nearest: LlamaMLP" in done.stdout


# --- presets -------------------------------------------------------------------------------------------------------


def test_presets_are_listed_and_those_that_fit_a_model(folder: Path) -> None:
    done = run("presets")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("21 presets\n")
    assert re.search(
        r" PHI_FUSED_PROJECTIONS +<5.25,>=5.17 +Queries, keys and values as one projection\.", done.stdout
    )
    assert "Its MLP has no gate" not in done.stdout
    assert re.search(r" LIGER +can't be used here: The preset LIGER needs", done.stdout)

    told = run("presets", folder, "--json")
    assert told.exit_code == 0, told.output
    (only,) = json.loads(told.stdout)["presets"]
    assert only["name"] == "LLAMA_FUSED_PROJECTIONS"
    assert "SmolLM2" in only["description"]
    assert (only["missing"], ">=5.17" in only["transformers"]) == ("", True)
    assert run("presets", folder).stdout.startswith(f"1 preset for {folder}\n")
    assert run("presets", folder / "none").exit_code == 2


def test_where_no_preset_fits_the_reason_is_said(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    done = run("presets", tmp_path)
    assert done.exit_code == 0
    assert "No preset was verified on models of the type 'gpt2'" in done.stdout
    assert "'gpt2'" in json.loads(run("presets", tmp_path, "--json").stdout)["reason"]


@pytest.mark.process
def test_what_libraries_say_while_they_are_imported_is_not_said() -> None:
    code = (
        "import logging, sys, types, warnings\n"
        "from pathlib import Path\n"
        "from patcher.cli import silence_imports\n"
        "silence_imports()\n"
        'said = \'import logging, warnings; logging.getLogger("a").{}("{}"); warnings.warn("{}")\'\n'
        "Path('noisy.py').write_text(said.format('warning', 'never', 'never'))\n"
        "Path('failing.py').write_text('import logging; logging.getLogger(\"b\").error(\"always\")')\n"
        "sys.path.insert(0, '.')\n"
        "import noisy, failing\n"
        "logging.getLogger('a').warning('later'); warnings.warn('afterwards')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    assert "never" not in done.stderr
    assert all(word in done.stderr for word in ("always", "later", "afterwards"))


def test_presets_and_patchers_are_combined(folder: Path, mine: str) -> None:
    named = ["--preset", "LLAMA_FUSED_PROJECTIONS"]
    own = ["--class", f"LlamaRMSNorm={mine}:Norm", "--fusion", "gate_up, qkv"]
    data = json.loads(run("plan", folder, *named, *own, "--json").stdout)
    assert {was for _, was, _ in data["replaced"] + data["fused"]} == {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm"}
    assert json.loads(run("plan", folder, *named, "--json").stdout)["ok"]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("where", ["my_patches.py", "inner/more_patches.py", "else-where/other_patches.py"])
def test_a_patcher_is_found_by_its_file(where: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text(MINE)
    for file in (where, tmp_path / where):
        assert run("plan", folder, "--patcher", f"{file}:DOUBLED").exit_code == 0
        assert run("plan", folder, "--class", f"LlamaRMSNorm={file}:Norm").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "FOLDER", "--preset", "QWEN3_FUSED"],
            r"there is no preset 'QWEN3_FUSED'; did you mean 'QWEN3_",
        ),
        (["plan", "FOLDER", "--preset", "for_model"], r"there is no preset 'for_model'"),
        (["plan", "FOLDER", "--preset", "__file__"], r"there is no preset '__file__'; `patcher presets` lists them"),
        (["plan", "FOLDER", "--preset", "LIGER"], r"The preset LIGER needs"),
    ],
    ids=["misspelt", "function", "dunder", "lacking"],
)
def test_a_preset_that_is_none_exits_with_2(folder: Path, arguments: list[str], message: str) -> None:
    done = run(*(folder if argument == "FOLDER" else argument for argument in arguments))
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.search(message, said(done)), done.stderr


def test_the_help_of_codegen_lists_its_commands() -> None:
    for option in ("--help", "-h"):
        shown = run("codegen", option).output
        assert re.search(r"verify +Check that the models of a file are what its config says\.", shown)
        assert re.search(r"generate +Generate patched modeling files from configs\.", shown)


@pytest.mark.process
def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "patcher", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"patcher {importlib.metadata.version('patcher')}\n"


# --- wrong use -----------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, list[str], str]] = [
    ("no model", ["plan"], r"Missing argument 'MODEL'"),
    ("no command", ["pln", "x"], r"No such command 'pln'"),
    ("no option", ["plan", "x", "--fusoin", "qkv"], r"No such option"),
    (
        "no patcher",
        ["diff", "FOLDER"],
        r"diff needs a patcher, by one or more of --preset NAME",
    ),
    ("fusion", ["plan", "FOLDER", "--fusion", "qkw"], r"'qkw' isn't a fusion; did you mean 'qkv'"),
    ("nothing", ["plan", "FOLDER", "--fusion", ""], r"'' isn't a fusion"),
    ("no preset", ["plan", "FOLDER", "--fusion", "qkv", "--preset", ""], r"there is no preset ''"),
    (
        "folder",
        ["plan", "/no/such/folder", "--fusion", "qkv"],
        r"'/no/such/folder' isn't a model that can be used here",
    ),
    ("empty folder", ["diff", ".", "--fusion", "qkv"], r"'\.' isn't a model that can be used here"),
    ("form", ["plan", "FOLDER", "--patcher", "my_patches"], r"takes MODULE:CONSTANT, found 'my_patches'"),
    ("module", ["plan", "FOLDER", "--patcher", "no_such:X"], r"can't be imported: ModuleNotFoundError"),
    ("broken", ["plan", "FOLDER", "--patcher", "broken_patches:X"], r"can't be imported: KeyError: 'half done'"),
    (
        "constant",
        ["plan", "FOLDER", "--patcher", "my_patches:DOUBLE"],
        r"there is no DOUBLE in .*; nearest: DOUBLED",
    ),
    (
        "kind",
        ["plan", "FOLDER", "--patcher", "my_patches:NUMBER"],
        r"NUMBER is a int in my_patches; nearest: DOUBLED, SAME",
    ),
    (
        "conflict",
        ["plan", "FOLDER", "--patcher", "my_patches:SAME", "--patcher", "my_patches:UNFIT"],
        r"Both patchers",
    ),
    ("key", ["plan", "FOLDER", "--class", "my_patches:Norm"], r"takes NAME=MODULE:CLASS, found 'my_patches:Norm'"),
    ("name", ["plan", "FOLDER", "--function", "rotate_half=my_patches:turm"], r"no turm in my_patches; nearest: turn"),
    (
        "like",
        ["plan", "FOLDER", "--class", "like:LamaRMSNorm=my_patches:Norm"],
        "has no class 'LamaRMSNorm'",
    ),
    (
        "value",
        ["plan", "FOLDER", "--class", "LlamaMLP=my_patches:NUMBER"],
        r"NUMBER is a int in my_patches; --class takes NAME=MODULE:CLASS",
    ),
]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_use_exits_with_2_and_one_paragraph(folder: Path, arguments: list[str], message: str) -> None:
    done = run(*(str(folder) if argument == "FOLDER" else argument for argument in arguments))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("rror:") <= 2


@pytest.mark.usefixtures("mine")
def test_a_config_that_is_no_json_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = run("plan", tmp_path, "--fusion", "qkv", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not a valid JSON file" in said(done)
    assert said(done).count("\n") == 0


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("command", ["plan", "verify", "bench"])
def test_a_file_of_weights_that_was_cut_off_is_told_in_a_line(command: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, cut_off := tmp_path / "cut off")
    weights = cut_off / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run(command, cut_off, "--fusion", "qkv", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "not fully covered" in said(done) or "can't be read as a load would read it" in said(done)
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("mine")
def test_code_that_a_repo_brings_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "brought", "auto_map": {"AutoConfig": "brought.Brought"}})
    )
    (tmp_path / "brought.py").write_text(
        f"open({str(trap)!r}, 'w').close()\nfrom transformers import PretrainedConfig\n"
        "class Brought(PretrainedConfig):\n    model_type = 'brought'\n"
    )
    for command in ("plan", "verify", "diff"):
        done = run(command, tmp_path, "--fusion", "qkv")
        assert done.exit_code == 2, done.output
        assert "can be used here. It has code of its own: if you trust that, pass" in said(done)
        assert "(--trust-remote-code)" in said(done)
    assert not trap.exists()
    assert run("diff", tmp_path, "--fusion", "qkv", "--trust-remote-code").exit_code == 2  # it has no model
    assert trap.exists()


@pytest.mark.process
def test_the_process_says_the_same(folder: Path, mine: str, tmp_path: Path) -> None:
    def process(*arguments: str) -> Any:
        return fresh.run("from patcher.cli import main; main()", *arguments, cwd=tmp_path, check=False)

    done = process("plan", str(folder), "--patcher", f"{mine}:UNFIT", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["ok"] is False
    done = process("diff", str(folder), "--patcher", f"{mine}:NUMBER")
    assert (done.returncode, done.stdout) == (2, "")
    assert said(done).startswith("error: --patcher my_patches:NUMBER: NUMBER is a int")
    assert "Traceback" not in done.stderr
