"""The keys of model configs: which concern attention and what they become, which concern other things, which are refused.

The names are those of Hugging Face configs (transformers 5). docs/model-configs.md shows them, of other things only the subjects;
tests hold it against these tables.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["ATTENTION", "NOTED", "OTHER", "REFUSED", "SYNONYMS", "is_quiet", "kind_of_key"]

ATTENTION: dict[str, str] = {
    "model_type": "the family, which says how the other keys are read",
    "num_hidden_layers": "how many layers there are",
    "num_attention_heads": "`call.q_heads`",
    "num_key_value_heads": "`call.kv_heads`",
    "head_dim": "`call.head_dim`",
    "hidden_size": "`call.head_dim` if `head_dim` isn't given: `hidden_size / num_attention_heads`",
    "qk_nope_head_dim": "added to `qk_rope_head_dim`: `call.head_dim` (MLA)",
    "qk_rope_head_dim": "added to `qk_nope_head_dim`: `call.head_dim` (MLA)",
    "qk_head_dim": "must equal that sum",
    "v_head_dim": "`call.value_dim` (MLA, mimo_v2_flash)",
    "layer_types": "which layers are local, global, chunked or indexed, and which have a state; also `layers_block_type`",
    "sliding_window": "the window of local layers: W keys including the query's own, so `left=W-1`",
    "sliding_window_size": "must equal `sliding_window` (gemma2); the keys before the query's own (mimo_v2_flash)",
    "use_sliding_window": "whether there are local layers",
    "max_window_layers": "the first local layer (qwen2, qwen3), or the end of the local layers (qwen2_moe)",
    "sliding_window_pattern": "the interval between global layers",
    "no_rope_layers": "which layers are global (llama4_text) or local (smollm3)",
    "no_rope_layer_interval": "the same, as an interval",
    "attention_chunk_size": "the chunk size of chunked layers",
    "local_attention": "the window of ModernBERT's local layers: half of it on each side",
    "global_attn_every_n_layers": "the interval between global layers (ModernBERT)",
    "use_bidirectional_attention": "a text encoder of gemma3_text (true) or gemma4_text (`all`): `full`, and windows of half "
    "the width on each side, one more of gemma4_text",
    "is_causal": "false: `full` instead of `causal`, and windows on both sides",
    "is_decoder": "true: BERT and related models are causal",
    "attn_logit_softcapping": "`call.logits_soft_cap`",
    "query_pre_attn_scalar": "`metadata.softmax_scale`: 1 divided by its square root",
    "attention_multiplier": "`metadata.softmax_scale`",
    "scale_attn_weights": "false: `metadata.softmax_scale` is 1 (gpt2)",
    "scale_attn_by_inverse_layer_idx": "true: `call.softmax_scale` of layer n, counted from 1, is divided by n (gpt2)",
    "rope_scaling": "`metadata.softmax_scale` with MLA (`mscale_all_dim` of yarn); otherwise not read",
    "rope_parameters": "the newer name of `rope_scaling`",
    "attn_temperature_tuning": "true: `call.score` of layers without rotary embedding is a temperature by position (llama4_text)",
    "floor_scale": "the positions after which that temperature rises",
    "attn_scale": "how much it rises",
    "relative_attention_num_buckets": "`call.score`: T5's buckets, of which the model passes the table",
    "relative_attention_max_distance": "the distance from which they are one",
    "local_radius": "the window of LongT5's encoder, on each side",
    "encoder_attention_type": "must be `local` (LongT5's encoder)",
    "num_decoder_layers": "how many layers a T5's decoder has",
    "num_kv_heads": "`call.kv_heads` (falcon with `new_decoder_architecture`)",
    "new_decoder_architecture": "whether `num_kv_heads` counts (falcon)",
    "multi_query": "otherwise: true for one `call.kv_heads` (falcon)",
    "softmax_scale": "`metadata.softmax_scale` (mpt)",
    "alibi_bias_max": "`call.score`: the slopes of ALiBi (mpt)",
    "image_size": "with `patch_size`, the grid of an image's patches",
    "patch_size": "the pixels of a patch",
    "depths": "the layers of each stage (swin, swinv2)",
    "window_size": "the side of the windows that the grid is cut into",
    "window_block_indices": "the layers with windows (vitdet)",
    "global_attn_indexes": "the layers without windows (SAM)",
    "use_rel_pos": "true: `call.score` has a bias for each row and column of the grid (SAM)",
    "use_relative_position_embeddings": "the same (vitdet)",
    "use_relative_position_bias": "true: `call.score` has a bias by the distances in the grid (beit)",
    "use_shared_relative_position_bias": "true: and one that all layers share (beit)",
    "kv_lora_rank": "`latent.latent_dim` (MLA)",
    "q_lora_rank": "`latent.query_latent_dim`; null: queries have one projection",
    "rope_interleave": "false: `latent.rope_pairs` is `halves`",
    "index_topk": "how many keys an indexer leaves to each query: `indexer.top_k` (deepseek_v32, glm_moe_dsa)",
    "index_n_heads": "`indexer.heads`",
    "index_head_dim": "`indexer.head_dim`",
    "indexer_types": "which layers have an indexer, and which use the selection of one before them (glm_moe_dsa)",
    "index_topk_pattern": "the same, as letters F and S or a list",
    "index_topk_freq": "the same, as an interval",
    "index_skip_topk_offset": "where that interval starts",
    "index_topk_blocks": "how many blocks of keys an indexer leaves: `indexer.top_blocks` (minimax_m3_vl_text)",
    "index_block_size": "`indexer.block_size`",
    "index_local_blocks": "how many of them are the last ones: `indexer.local_blocks`",
    "sparse_attention_config": "the older names of these, and which layers are indexed",
    "hybrid_layer_pattern": "which layers are local: 1 (mimo_v2_flash)",
    "swa_num_attention_heads": "must equal `num_attention_heads` (mimo_v2_flash)",
    "swa_num_key_value_heads": "`call.kv_heads` of local layers, by default twice `num_key_value_heads` (mimo_v2_flash)",
    "swa_head_dim": "`call.head_dim` of local layers (mimo_v2_flash)",
    "swa_v_head_dim": "`call.value_dim` of local layers (mimo_v2_flash)",
    "add_swa_attention_sink_bias": "whether local layers have sinks (mimo_v2_flash)",
    "add_full_attention_sink_bias": "whether global layers have sinks (mimo_v2_flash)",
    "global_head_dim": "`call.head_dim` of global layers (gemma4_text)",
    "attention_k_eq_v": "true: global layers make keys and values by one projection, and read the next key (gemma4_text)",
    "num_global_key_value_heads": "`call.kv_heads` of global layers (gemma4_text)",
    "per_layer_config": "instead of these three, `head_dim` and `num_key_value_heads` by layer (gemma4_text)",
    "num_kv_shared_layers": "how many layers, the last ones, attend to an earlier layer's keys (gemma4_text)",
    "full_attention_interval": "the interval between global layers; the others have a state (qwen3_next, qwen3_5)",
    "linear_num_value_heads": "`recurrence.call.q_heads`: heads of values and of the state (gated_delta_rule)",
    "linear_num_key_heads": "`recurrence.call.kv_heads`",
    "linear_key_head_dim": "`recurrence.call.head_dim`",
    "linear_value_head_dim": "`recurrence.call.value_dim`",
    "linear_conv_kernel_dim": "`convolution.call.dims.width`",
    "linear_allow_neg_eigval": "true: `beta_max` is 2 (olmo_hybrid)",
    "linear_num_heads": "all heads of a layer with a state (kimi_linear)",
    "linear_head_dim": "their dim",
    "linear_attn_config": "the older names of these, and which layers have a state, counted from 1",
    "attn_type_list": "which layers attend: 1 (minimax)",
    "mamba_n_heads": "`recurrence.call.q_heads` (mamba2); also `num_heads`, `mamba_num_heads` and `n_mamba_heads`",
    "mamba_d_head": "`recurrence.call.value_dim`; must follow from the heads and `mamba_expand`, where that is read",
    "mamba_n_groups": "`recurrence.call.kv_heads`: the groups of B and C; also `n_groups` and `mamba_ngroups`",
    "mamba_d_state": "`recurrence.call.head_dim` (mamba2) or `dims.state_dim` (mamba1); also `state_size` and `ssm_state_size`",
    "mamba_d_conv": "`convolution.call.dims.width`; also `conv_kernel`",
    "mamba_expand": "times `hidden_size`: the channels of a Mamba layer; also `expand`",
    "mamba_d_ssm": "these channels (falcon_h1)",
    "mamba_chunk_size": "`chunk_size`; also `chunk_size` of a Mamba config, and `block_size` of minimax",
    "mamba_conv_bias": "whether the convolution has a bias; also `use_conv_bias`",
    "mamba_hidden_act": "the activation after the convolution (nemotron_h); of other families `hidden_act`",
    "mamba_ssm_cache_dtype": "`state_dtype`: `float32` or `bfloat16`; also `mamba_ssm_dtype`",
    "time_step_limit": "`dt_min` and `dt_max` (mamba2); zamba2 and nemotron_h clip to `time_step_min` and up instead",
    "attn_layer_indices": "which layers attend (bamba)",
    "attn_layer_period": "the interval between layers that attend (jamba)",
    "attn_layer_offset": "the first of them",
    "hybrid_override_pattern": "the kind of each layer as a letter: M, *, - or E (nemotron_h)",
    "full_attn_idxs": "which layers attend (lfm2)",
    "conv_L_cache": "`convolution.call.dims.width` of the other layers (lfm2)",
    "attention_dropout": "`metadata.dropout_prob`",
    "dtype": "`metadata.runtime_dtype` and `call.dtype`",
    "output_attentions": "`call.return_weights`",
    "max_position_embeddings": "the length that `attnops plan --model` takes if none is given",
    "max_source_positions": "the number of keys that it takes for Whisper's cross attention",
    "is_encoder_decoder": "whether you have to give a `part`",
    "text_config": "the language model of a multimodal model: read instead of the whole config",
}
"""What a key becomes. A key that its family doesn't read is refused unless it is null."""

# Synonyms, in every family.
SYNONYMS = {"torch_dtype": "dtype", "_sliding_window_pattern": "sliding_window_pattern"}

OTHER: dict[str, tuple[str, ...]] = {
    "position embeddings: applied to the query and key before attention": (
        "rope_theta", "rope_local_base_freq", "local_rope_theta", "global_rope_theta", "partial_rotary_factor",
        "original_max_position_embeddings", "learned_pos_emb", "attn_rotary_emb",
        "rotary_dim", "swa_rope_theta", "indexer_rope_interleave",
        "initial_context_length", "type_vocab_size", "sinusoidal_pos_embds", "rope_scaling_factor", "rope_ntk_alpha",
    ),
    "projections and norms around attention": (
        "attention_bias", "attention_out_bias", "bias", "qkv_bias", "use_qkv_bias", "use_bias", "use_qk_norm", "qk_layernorm",
        "clip_qkv", "norm_bias", "norm_eps", "rms_norm_eps", "layer_norm_eps",
        "mla_scale_q_lora", "mla_scale_kv_lora", "attention_value_scale", "use_gemma_norm", "qk_norm_type", "layernorm_epsilon",
        "layer_norm_epsilon", "norm_epsilon", "use_parallel_residual", "residual_multiplier", "attention_in_bias",
        "attn_output_gate", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "mla_use_nope",
        "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor", "linear_attn_beta_factor",
        "layernorm_full_attention_alpha", "layernorm_full_attention_beta", "layernorm_linear_attention_alpha",
        "layernorm_linear_attention_beta", "use_shared_attention_adapter", "adapter_rank", "num_mem_blocks", "add_bias_linear",
        "use_mem_rope", "use_long_context", "projectors_bias",
    ),
    "projections, norms and initial values around operations with a state": (
        "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor", "time_step_min",
        "time_step_max", "time_step_floor", "time_step_rank", "mamba_dt_rank", "mamba_proj_bias", "mamba_rms_norm",
        "mamba_norm_before_gate", "ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "rescale_prenorm_residual",
        "residual_in_fp32", "mamba_dt_max", "mamba_dt_init_floor", "mamba_use_mlp",
        "mamba_inner_layernorms", "norm_before_gate", "rms_norm", "conv_dim", "conv_dim_out",
        "conv_use_xavier_init",
    ),
    "other dropouts": (
        "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout",
        "dropout_rate", "dropout_prob", "emb_pdrop", "mlp_dropout", "dropout", "qa_dropout", "seq_classif_dropout",
        "classifier_dropout", "activation_dropout",
        "layerdrop", "summary_last_dropout", "summary_first_dropout",
    ),
    "feed-forward, experts, embeddings and heads of the model": (
        "vocab_size", "intermediate_size", "intermediate_size_mlp", "n_inner", "hidden_dim", "hidden_act",
        "hidden_activation", "activation", "activation_function", "mlp_bias", "moe_intermediate_size",
        "shared_expert_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok",
        "experts_per_token", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "topk_method",
        "scoring_func", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "moe_layer_freq",
        "ep_size", "num_nextn_predict_layers", "decoder_sparse_step", "mlp_only_layers", "interleave_moe_layer_step",
        "moe_layers", "mlp_layer_types", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits",
        "swiglu_limit", "swiglu_alpha", "aux_loss_alpha", "seq_aux", "final_logit_softcapping", "logit_scale",
        "logits_scaling", "embedding_multiplier", "lm_head_bias", "tie_word_embeddings", "decoder_bias",
        "classifier_activation", "classifier_bias", "classifier_pooling", "sparse_prediction",
        "sparse_pred_ignore_index", "summary_type", "summary_use_proj", "summary_activation",
        "summary_proj_to_labels", "initializer_range", "init_std", "ffn_dim", "do_layer_norm_before",
        "_remove_final_layer_norm", "word_embed_proj_dim", "enable_bias", "layer_norm_elementwise_affine",
        "embedding_size", "initializer_cutoff_factor", "pretraining_tp", "shared_intermediate_size", "n_ctx",
        "d_ff", "feed_forward_proj", "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "initializer_factor",
        "apply_residual_connection_post_layernorm", "ffn_hidden_size", "num_ln_in_parallel_attn", "parallel_attn",
        "expansion_ratio", "embedding_fraction", "norm_type", "no_bias", "patch_embed_hidden_size", "global_block_size",
        "num_channels", "mlp_ratio", "drop_path_rate", "use_absolute_embeddings", "encoder_stride", "stage_names",
        "out_features", "out_indices", "_out_features", "_out_indices", "pretrain_image_size", "residual_block_indices",
        "use_absolute_position_embeddings", "output_channels", "use_abs_pos", "num_pos_feats", "mlp_dim", "scale",
        "pretrained_window_sizes", "path_norm", "use_mask_token", "layer_scale_init_value", "use_mean_pooling",
        "pool_scales", "use_auxiliary_head", "auxiliary_loss_weight", "auxiliary_channels", "auxiliary_num_convs",
        "auxiliary_concat_input", "semantic_loss_ignore_index", "add_fpn", "reshape_hidden_states", "is_vqa", "vision_config",
        "moe_topk", "zero_expert_num", "zero_expert_type", "expert_ffn_hidden_size", "router_bias", "use_routing_bias",
        "dense_intermediate_size", "num_mtp_modules", "index_share_for_mtp_iteration",
        "vocab_size_per_layer_input", "hidden_size_per_layer_input",
        "enable_moe_block", "use_double_wide_mlp", "top_k_experts",
        "mlp_multipliers", "lm_head_multiplier", "mlp_alpha_factor", "mlp_beta_factor",
        "layernorm_mlp_alpha", "layernorm_mlp_beta", "postnorm", "shared_moe_mode",
        "expert_layer_period", "expert_layer_offset", "z_loss_coefficient", "mlp_hidden_act", "moe_latent_size",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_expert_group",
        "num_experts_per_token",
        "num_shared_experts", "moe_renormalize", "moe_router_activation_func", "use_grouped_topk",
        "block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "block_dim", "block_ff_dim",
        "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init",
        "tie_embedding",
        "pooler_num_attention_heads", "pooler_fc_size", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    ),
    "tokens, labels and generation": (
        "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id",
        "decoder_start_token_id", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index",
        "mm_tokens_per_image", "id2label", "label2id", "problem_type", "use_cache", "cache_implementation",
        "task_specific_params", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
        "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
        "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "prefix", "tokenizer_class",
        "spatial_merge_size", "multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer",
        "vision_feature_select_strategy", "image_seq_length", "num_logits_to_keep",
    ),
    "the other parts of an encoder-decoder": (
        "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim",
        "decoder_ffn_dim", "encoder_layerdrop", "decoder_layerdrop", "max_target_positions",
        "scale_embedding", "d_model", "num_mel_bins", "use_weighted_layer_sum", "classifier_proj_size",
        "median_filter_width", "apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks",
        "mask_feature_prob", "mask_feature_length", "mask_feature_min_masks", "decoder_vocab_size",
        "share_encoder_decoder_embeddings",
    ),
    "bookkeeping of the library": (
        "architectures", "auto_map", "torchscript", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder",
        "transformers_version", "_name_or_path", "return_dict", "output_hidden_states", "chunk_size_feed_forward",
        "quantization_config", "gradient_checkpointing", "init_device", "slow_but_exact", "output_past",
        "unsloth_version", "unsloth_fixed", "sentence_transformers",
        "reference_compile", "repad_logits_with_grad", "finetuning_task", "_commit_hash",
    ),
    "which of transformers' own kernels runs": (
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_flash_attn_2_enabled", "deterministic_flash_attn", "reorder_and_upcast_attn", "use_flash_attention",
        "use_flash_attention_2", "use_flash_attn", "attention_softmax_in_fp32", "masked_softmax_fusion", "attn_impl",
        "use_mamba_kernels", "use_mambapy", "use_associative_scan", "use_mem_eff_path",
    ),
}  # fmt: skip
"""Why a key isn't read: it doesn't concern the attention call."""

# Those of these keys that change the inputs of attention: a note says that the model must do that.
NOTED = {
    "clip_qkv": "the model clips query, key and value, before attention",
    "mla_scale_q_lora": "the model multiplies queries by sqrt(hidden_size / q_lora_rank), before attention",
    "mla_scale_kv_lora": "the model multiplies latents by sqrt(hidden_size / kv_lora_rank), before attention",
    "attention_value_scale": "the model multiplies values by it, before attention",
    "key_multiplier": "the model multiplies keys by it, before attention",
    "ssm_multipliers": "the model multiplies what it projects by them: gate, x, B, C and dt",
}

# Values that request nothing.
_ABSENT: tuple[Any, ...] = (None, False, [], {}, ())
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "alibi": (_ABSENT, "ALiBi adds a bias by distance to the logits, read only of falcon and mpt"),
    "use_alibi": (_ABSENT, "ALiBi adds a bias by distance to the logits"),
    "position_embedding_type": (
        (None, "absolute", "learned", "learned_absolute", "nope", "rope", "rope_gptj", "rotary", "sans_pos"),
        "a kind of position embedding that may add terms to the logits",
    ),
    "relative_attention": (_ABSENT, "relative attention adds terms to the logits"),
    "add_cross_attention": (_ABSENT, "a model config doesn't declare cross-attention to an encoder"),
    "full_attn_mod": ((None, 1), "a rule for which layers are global, which no family here reads"),
    "attn_config": (_ABSENT, "an attention config of the model's own, read only of mpt"),
    "attention_types": (_ABSENT, "layer kinds under another name"),
    "attention_window": (_ABSENT, "windows of Longformer, with global tokens"),
    "attention_method": ((None, "MLA", "mla"), "another attention than LongCat's latent one"),
    "softmax_type": ((None, "vanilla"), "another softmax"),
    "sinks": (_ABSENT, "sinks under a key that no family here has"),
    "attn_logit_cap": (_ABSENT, "a soft cap under a key that no family here has"),
}
"""Key: the values that request nothing, and what any other value requests."""

_OTHER = {key for keys in OTHER.values() for key in keys}
# Unknown keys that match this may concern attention, and are not ignored.
_SUSPICIOUS = re.compile(
    r"attn|attention|window|heads?(_|$)|mask|alibi|position_bias|relative|causal|bidirection|sinks?(_|$)|soft_?cap"
    r"|(^|_)(qk|qkv|kv|q|k|v|key|query|value|keys|queries)(_|$)|chunk|(^|_)(local|global)(_|$)|softmax|sparse"
)


def kind_of_key(key: str) -> str:
    """Classify a key as 'attention', 'other', 'refused', 'suspicious' or 'unknown'."""
    if SYNONYMS.get(key, key) in ATTENTION:
        return "attention"
    if key in REFUSED:
        return "refused"
    if key in _OTHER or key.endswith("_token_id"):
        return "other"
    return "suspicious" if _SUSPICIOUS.search(key) else "unknown"


def is_quiet(key: str, value: Any) -> bool:
    """Whether the value of a key that can't be represented requests nothing."""
    silent = REFUSED[key][0] if key in REFUSED else _ABSENT
    return any(type(value) is type(other) and value == other for other in silent)
