"""WHO holds a page: free stacks, counts of owners, super-pages that move between groups."""

from kvweave.pool.pages import NULL, GroupPages, Ids, PoolPages

__all__ = ["NULL", "GroupPages", "Ids", "PoolPages"]
