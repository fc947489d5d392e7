"""WHERE a sequence lives: block tables and kernel ids, always in step; slots of tokens."""

from kvweave.table.block_table import BlockTable, Counts, spread

__all__ = ["BlockTable", "Counts", "spread"]
