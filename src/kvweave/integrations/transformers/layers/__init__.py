"""Layers of a paged cache with the interface of transformers' cache layers, one module for each kind."""
