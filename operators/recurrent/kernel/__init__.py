"""Linear recurrences on raw arrays: in chunks of tokens, a token at a time, and the convolution before them."""
