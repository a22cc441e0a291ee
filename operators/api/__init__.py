"""The operations as a model author meets them: Attention, dot_product_attention, and what their keywords mean."""
