"""What a plan notes of a call, whatever runs it."""
