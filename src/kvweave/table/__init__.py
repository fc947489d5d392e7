"""WHERE a sequence lives: block tables and kernel ids, always in step; slots of tokens."""

from kvweave.table.block_table import BlockTable, spread

__all__ = ["BlockTable", "spread"]
