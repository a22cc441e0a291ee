"""Block-sparse flash attention for TPUs in Pallas, forward and backward: SplashPart, in splash_attention."""
