"""WHERE a sequence lives: block tables, kernel ids, slots."""

from kvweave.table.tables import Counts, GroupTable

__all__ = ["Counts", "GroupTable"]
