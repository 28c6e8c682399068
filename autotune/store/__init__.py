"""Everything the product remembers, on SQLite or PostgreSQL."""

from autotune.domain.page import Page
from autotune.store.base import Clock, utc_now
from autotune.store.database import Database, Transaction
from autotune.store.studies import Lease

__all__ = ["Clock", "Database", "Lease", "Page", "Transaction", "utc_now"]
