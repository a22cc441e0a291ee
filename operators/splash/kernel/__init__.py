"""Block-sparse flash attention for TPUs in Pallas, forward and backward: PartialSplash, in splash_attention."""
