"""`kvweave run`: a model generates on pages, and what that saved is shown."""
