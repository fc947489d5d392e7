"""WHO holds a page: free stacks, counted references, super-pages that move between groups."""

from kvweave.pool.group import NO_PAGES, NULL, Counts, Ids, PagedGroup
from kvweave.pool.page_pool import Obtainable, PagePool
from kvweave.pool.pages import GroupPages, NoPages

__all__ = ["NO_PAGES", "NULL", "Counts", "GroupPages", "Ids", "NoPages", "Obtainable", "PagePool", "PagedGroup"]
