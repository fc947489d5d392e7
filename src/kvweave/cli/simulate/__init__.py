"""`kvweave simulate`: what a cache would have saved on a trace."""
