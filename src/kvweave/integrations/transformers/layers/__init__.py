"""Layers of a cache, as transformers' models want to find them; each answers for one kind."""
