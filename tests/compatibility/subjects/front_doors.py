"""Other places that a model is loaded through, and other ways to run it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    ContinuousBatchingConfig,
    GenerationConfig,
    GgufConfig,
    StaticCache,
    pipeline,
)

from tests.compatibility.columns import column
from tests.compatibility.outcomes import NOT_APPLICABLE, compared, same_models, worst
from tests.compatibility.rows import Row
from tests.support.caches import CACHE
from tests.support.checkpoints import same_checkpoint, saved
from tests.support.comparing import logits
from tests.support.gguf_files import write_gguf
from tests.support.tiny import build_tiny, remote_code_model, tiny_tokenizer

SUBJECT = "Front doors"
SENTENCES = ["w4 w5 w6", "w7 w8", "w9 w10 w11 w12"]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@column(SUBJECT, "`SentenceTransformer`", needs="sentence_transformers")
def sentence_transformer(row: Row, folder: Path) -> str:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if row.has_images:
        return NOT_APPLICABLE
    row.stock().model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    transformer = Transformer(str(folder / "model"))
    pooling = Pooling(row.config().hidden_size, "mean")
    SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(folder / "stock"))
    stock = SentenceTransformer(str(folder / "stock"), device="cpu")
    patched = SentenceTransformer(str(folder / "stock"), device="cpu", model_kwargs={"patcher": row.patcher})
    patched.save(str(folder / "patched"))
    assert same_checkpoint(folder / "patched", folder / "stock")
    again = SentenceTransformer(str(folder / "patched"), device="cpu")
    expected = stock.encode(SENTENCES, convert_to_tensor=True)
    assert torch.equal(again.encode(SENTENCES, convert_to_tensor=True), expected)
    return compared(patched.encode(SENTENCES, convert_to_tensor=True), expected)


@column(SUBJECT, "`CrossEncoder`", needs="sentence_transformers")
def cross_encoder(row: Row, folder: Path) -> str:
    from sentence_transformers import CrossEncoder

    if row.has_images:
        return NOT_APPLICABLE
    config = row.config()
    config.num_labels = 1
    build_tiny(config, model_class=AutoModelForSequenceClassification).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    pairs = [(SENTENCES[0], SENTENCES[1]), (SENTENCES[1], SENTENCES[2])]
    stock = CrossEncoder(str(folder), device="cpu")
    patched = CrossEncoder(str(folder), device="cpu", model_kwargs={"patcher": row.patcher})
    return compared(patched.predict(pairs, convert_to_tensor=True), stock.predict(pairs, convert_to_tensor=True))


@column(SUBJECT, "GGUF", needs="gguf")
def gguf_file(row: Row, folder: Path) -> str:
    if row.config().model_type != "llama":  # what transformers reads of that kind
        return NOT_APPLICABLE
    write_gguf(row.stock(), folder / "model.gguf")
    options = {"gguf_file": "model.gguf", "quantization_config": GgufConfig(dequantize=True)}
    stock = AutoModelForCausalLM.from_pretrained(folder, **options)
    patched = AutoModelForCausalLM.from_pretrained(folder, patcher=row.patcher, **options)
    assert saved(patched, folder / "patched") == saved(stock, folder / "stock")
    return same_models(patched, stock)


@column(SUBJECT, "`trust_remote_code`")
def remote_code(row: Row, folder: Path) -> str:
    """A model with a gated MLP and an attention of one projection."""
    if row.patcher.fusions and set(row.patcher.fusions) != {"gate_up"}:
        return NOT_APPLICABLE
    patcher = row.patcher.replace(
        class_mapping={f"TinyRemote{key[-3:]}": cls for key, cls in row.patcher.class_mapping.items()}
    )
    remote_code_model(folder / "tiny_remote")
    options: dict[str, Any] = {"trust_remote_code": True}
    stock = AutoModelForCausalLM.from_pretrained(folder / "tiny_remote", **options)
    patched = AutoModelForCausalLM.from_pretrained(folder / "tiny_remote", patcher=patcher, **options)
    assert saved(patched, folder / "patched") == saved(stock, folder / "stock")
    return same_models(patched, stock)


@column(SUBJECT, "`pipeline`")
def pipelines(row: Row, folder: Path) -> str:
    if row.has_images:
        return NOT_APPLICABLE
    row.stock().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    given = pipeline("text-generation", model=row.patched(), tokenizer=tiny_tokenizer(), device="cpu")
    loaded = pipeline("text-generation", model=str(folder), patcher=row.patcher, device="cpu")
    stock = pipeline("text-generation", model=str(folder), device="cpu")
    texts = [each(SENTENCES[0], return_tensors=True, **GREEDY)[0] for each in (given, loaded, stock)]
    return compared(texts[:2], [texts[2], texts[2]], rounding=0)


@column(SUBJECT, "assisted generation")
def assisted(row: Row, folder: Path) -> str:
    patched, stock = row.patched(), row.stock()
    inputs = one_row(row)
    expected = stock.generate(**inputs, **GREEDY)
    ways: list[tuple[Any, dict[str, Any]]] = [(patched, {"prompt_lookup_num_tokens": 2})]
    if not row.has_images:  # no assistant takes images
        ways += [(patched, {"assistant_model": stock}), (stock, {"assistant_model": patched})]
    return worst(*(compared(main.generate(**inputs, **GREEDY, **how), expected, rounding=0) for main, how in ways))


@column(SUBJECT, "static cache, chunked prefill")
def static_cache(row: Row, folder: Path) -> str:
    patched, stock = row.patched(), row.stock()
    inputs = row.inputs()
    expected = stock.generate(**inputs, **GREEDY)
    ways: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}]
    if row.has_images:
        ways.pop()  # an image isn't cut
    outcomes = [compared(patched.generate(**inputs, **GREEDY, **how), expected, rounding=0) for how in ways]
    return worst(*outcomes, compared(prefilled(patched, inputs), prefilled(stock, inputs)))


@column(SUBJECT, "continuous batching")
def continuous_batching(row: Row, folder: Path) -> str:
    found = []
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)  # by default it takes what memory there is
    for model in (row.patched(), row.stock()):
        asked = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch([[4, 5, 6], [7, 8]], generation_config=asked, continuous_batching_config=small)
        found.append([torch.tensor(output.generated_tokens) for output in outputs.values()])
    return compared(*found, rounding=0)


@column(SUBJECT, "8 threads")
def threads(row: Row, folder: Path) -> str:
    patched = row.patched()
    inputs = row.inputs()
    alone = logits(patched, inputs), patched.generate(**inputs, **GREEDY)

    def once(number: int) -> Any:
        return logits(patched, inputs) if number % 2 else patched.generate(**inputs, **GREEDY)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(once, range(16)))
    return compared(found, [alone[1], alone[0]] * 8, rounding=0)


@column(SUBJECT, "copies, dtypes, `inference_mode`")
def copies(row: Row, folder: Path) -> str:
    patched, stock = row.patched(), row.stock()
    inputs = row.inputs()
    with torch.inference_mode():
        outcomes = [compared(logits(patched, inputs), logits(stock, inputs))]
    copied = copy.deepcopy(patched)
    assert saved(copied, folder / "copied") == saved(stock, folder / "stock")
    outcomes.append(compared(logits(copied, inputs), logits(patched, inputs), rounding=0))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        copied, other = copied.to(dtype), stock.to(dtype)
        assert saved(copied, folder / f"copied {dtype}") == saved(other, folder / f"stock {dtype}")
    return worst(*outcomes)


def one_row(row: Row) -> dict[str, Any]:
    """Arguments of `generate` for a batch of one."""
    inputs = row.inputs()
    patches = len(inputs.get("pixel_values", ())) // len(inputs["input_ids"])
    return {name: value[: patches if name == "pixel_values" else 1] for name, value in inputs.items()}


@torch.no_grad()
def prefilled(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The logits of a prompt and of two tokens after it, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    found = [model(**inputs, **{CACHE: cache}).logits]
    length = inputs["input_ids"].shape[1]
    for token in (5, 6):
        ids = torch.full((len(inputs["input_ids"]), 1), token)
        found.append(model(input_ids=ids, **{CACHE: cache}, position_ids=torch.tensor([[length]])).logits)
        length += 1
    return found
