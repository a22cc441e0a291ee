"""Recurrent operations: their arrays, and what is done about a split sequence."""
