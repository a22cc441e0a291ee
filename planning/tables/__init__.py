"""Calls that follow from their table of operands alone: the problem, where its arrays are, and the plan."""
