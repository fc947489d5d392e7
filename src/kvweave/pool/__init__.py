"""WHO holds a page: free stacks, counted references, super-pages that move between groups."""

from kvweave.pool.group import PagedGroup
from kvweave.pool.holders import Ids
from kvweave.pool.page_pool import Obtainable, PagePool
from kvweave.pool.pages import NULL, GroupPages, NoPages, PageStack

__all__ = ["NULL", "GroupPages", "Ids", "NoPages", "Obtainable", "PagePool", "PageStack", "PagedGroup"]
