"""The way of a call: described, planned, placed, run, returned."""
