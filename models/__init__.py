"""What a Hugging Face config says of attention."""
