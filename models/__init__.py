"""What a Hugging Face config says about attention."""
