"""Declared KV caches: what is said of one, what it takes of each device, where its arrays live, and what is against it."""
