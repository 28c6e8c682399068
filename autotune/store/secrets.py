"""Small things that the service must remember, and the API token's hash."""

import hmac

from sqlalchemy import select

from autotune.store.base import Repository
from autotune.store.tables import settings


class SettingsRepository(Repository):
    """Text by key."""

    def get(self, key: str) -> str | None:
        return self._connection.execute(select(settings.c.value).where(settings.c.key == key)).scalar_one_or_none()

    def put(self, key: str, value: str) -> None:
        self._upsert(settings, {"key": key, "value": value})


class TokenRepository(SettingsRepository):
    """The API token. Only its hash is ever given to the store."""

    _KEY = "token_hash"

    def replace(self, token_hash: str) -> None:
        """Accept this token from now on, and no other."""
        self.put(self._KEY, token_hash)

    def verify(self, token_hash: str) -> bool:
        """Whether this is the token's hash; takes as long for a wrong one as for the right one."""
        stored = self.get(self._KEY)
        return stored is not None and hmac.compare_digest(stored.encode(), token_hash.encode())

    def exists(self) -> bool:
        return self.get(self._KEY) is not None
