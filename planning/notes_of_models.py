"""What plans note about a model's config.json: the rows of notes.NOTES, as (code, field, text)."""

from __future__ import annotations

__all__ = ["NOTES_OF_MODELS"]

NOTES_OF_MODELS: tuple[tuple[str, str, str], ...] = (
    ("model.layer_types", "layer_types", "layer_types decides, as in transformers; {patterns:list} would give other layers"),
    ("model.no_dtype", "dtype", "the config has no dtype; a call is declared in float32 unless another is given"),
    ("model.window_off", "sliding_window", "sliding_window={size} is off, as the config doesn't have use_sliding_window"),
    ("model.defaults", "model", "the config doesn't have {fields:list}: the default of {model}"),
    ("model.nested_config", "part",
     "{key} of {kind} is read; if its other parts have attention, they have their own configs"),
    ("model.spans", "mask",
     "tokens of one image, or of a prefix, see each other: pass q_segment_ids=span_ids(the span of each token, -1 for none)"),
    ("model.outside_nested_config", "model", "not read, as they are outside {config}: {keys:list}"),
    ("model.alias", "model_type", "{kind} is read as {family}, whose attention it has"),
    ("model.text_alone", "mask",
     "tokens of one image see each other in {kind}; the masks here are those of text alone, as part='text' asks"),
    ("model.assumed", "model_type",
     "{kind} is unknown and read as {family}, as assumed: what its code adds to that family's attention isn't seen here"),
    ("model.assumed_masks", "model_type",
     "{kind} is unknown: {key} is read with the masks of text alone, as assumed, whatever its other parts see"),
    ("model.noted", "model", "{key}={value}: {remark}"),
    ("model.windows", "batch", "the model cuts images into windows, each a row of the batch here"),
    ("model.cosine", "query", "the model normalises query and key before attention, and passes 16 sigmoid(...) as the table"),
    ("model.shifted_windows", "mask",
     "shifted windows have a mask array per window here; the model adds -100 to what it hides, which leaves weights near 1e-44"),
    ("model.indexer", "mask",
     "an indexer of {heads} heads of {head_dim} leaves {kept} to each query, of those that the mask shows. The plan is of "
     "attention to all of them: an upper bound, without the indexer's own work. Give its selection to the call as a mask array, "
     "or all are attended to"),
    ("model.shared_indexer", "mask",
     "{count} layers, those that are shared, have no indexer and use the selection of the last layer before them that has one"),
    ("model.shared_kv", "key",
     "layers {first} to {last} have no keys and values of their own and attend to those of {sources:list}; "
     "reads_layer of the model and of KVCache says which reads which"),
    ("model.two_attentions", "model",
     "each of {layers} layers has two attentions: those of layer n are layers 2n and 2n + 1 here"),
    ("model.no_attention", "model", "no layer attends: the model keeps the same bytes of a sequence whatever its length"),
    ("model.attention_and_state", "model",
     "layers with attention and {operation} have two declarations, and the plan has both; the model joins them"),
    ("model.decay_of_layers", "decay",
     "the model passes decay [heads]: the log decays of lightning times 1 - n / ({layers} - 1 + 1e-5) + 1e-5 in layer n, from 0"),
    ("model.gated_convolution", "convolution", "the model multiplies what goes into a convolution, and what comes out, by gates"),
    ("model.convolution_activation", "convolution",
     "the model applies {activation} after the convolution, which causal_conv1d doesn't"),
    ("model.normalised_dt", "dt", "the model normalises dt, B and C before the operation"),
    ("model.chunks", "chunk_size",
     "{key}={size} is no power of two: the operation's own chunks are used, which give the same result"),
    ("model.unread_limit", "dt",
     "time_step_limit={value} isn't read by transformers, which clips dt to at least time_step_min={least} in this family"),
    ("model.unknown_keys", "model", "not read, as attnops doesn't know them: {keys:list}"),
    ("model.ignored_keys", "ignore", "not read, as requested: {keys:list}"),
)  # fmt: skip
