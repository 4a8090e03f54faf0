"""Small models of each kind that `verify` has to give inputs to."""

from __future__ import annotations

from transformers import EsmConfig, T5Config, ViTConfig, WhisperConfig

from tests.support.tiny import tiny_bert_config, tiny_llama_config, tiny_mixtral_config

T5 = T5Config(
    vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, is_gated_act=True, pad_token_id=0,
    decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"],
)  # fmt: skip
WHISPER = WhisperConfig(
    vocab_size=128, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=64,
    max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    suppress_tokens=None, begin_suppress_tokens=None, architectures=["WhisperForConditionalGeneration"],
)  # fmt: skip
VIT = ViTConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
    architectures=["ViTForImageClassification"],
)  # fmt: skip
LLAMA, MIXTRAL, BERT = tiny_llama_config(), tiny_mixtral_config(), tiny_bert_config()
ESM = EsmConfig(vocab_size=33, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary",
                architectures=["EsmForMaskedLM"])  # fmt: skip
