"""Llama with one projection for queries, keys and values, from the description of a runtime Patcher.

patcher codegen examples/codegen/llama/llama_patch_gen_config.py --diff

The models of the file read the checkpoints of the original and write them back; `Patcher(fusions=["qkv"])` gives
models of transformers that compute the same.
"""

from transformers import LlamaForCausalLM

from patcher import Patcher
from patcher.codegen import PatchConfig

config = PatchConfig.from_patcher(Patcher(fusions=["qkv"], name="Llama with qkv joined"), LlamaForCausalLM)
