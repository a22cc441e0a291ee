"""Declared KV caches: their fields, the memory they need on each device, where their arrays are, and reasons against them."""
