"""Small things that the service must remember, the API token's hash, and browser sessions."""

import hmac
from datetime import datetime, timedelta

from sqlalchemy import delete, select

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

    def add_first(self, token_hash: str) -> bool:
        """Accept this token unless there is one; whether it is the one now. Of several at once one succeeds."""
        written = self._connection.execute(
            self._insert(settings).values(key=self._KEY, value=token_hash)
            .on_conflict_do_nothing(index_elements=["key"]).returning(settings.c.key))
        return written.one_or_none() is not None

    def verify(self, token_hash: str) -> bool:
        """Whether this is the token's hash; takes as long for a wrong one as for the right one."""
        stored = self.get(self._KEY)
        return stored is not None and hmac.compare_digest(stored.encode(), token_hash.encode())


class SessionRepository(SettingsRepository):
    """Browser sessions. Only hashes of their secrets are ever given to the store.

    Each remembers the token it was opened with, so that a new token ends it.
    """

    _PREFIX = "session:"

    def add(self, session_hash: str, *, token_hash: str, lifetime: timedelta) -> None:
        """Open a session; those that have expired are dropped on the way."""
        self._drop_expired()
        self.put(self._key(session_hash), f"{(self._clock() + lifetime).isoformat()} {token_hash}")

    def token_hash(self, session_hash: str) -> str | None:
        """The hash of the token a living session was opened with; None where there is no such session."""
        stored = self.get(self._key(session_hash))
        if stored is None:
            return None
        expires_at, _, token_hash = stored.partition(" ")
        return token_hash if datetime.fromisoformat(expires_at) > self._clock() else None

    def remove(self, session_hash: str) -> None:
        """End a session; an unknown one is no error."""
        self._connection.execute(delete(settings).where(settings.c.key == self._key(session_hash)))

    def clear(self) -> None:
        """End all sessions."""
        self._connection.execute(delete(settings).where(settings.c.key.startswith(self._PREFIX)))

    def _drop_expired(self) -> None:
        rows = self._connection.execute(
            select(settings.c.key, settings.c.value).where(settings.c.key.startswith(self._PREFIX))).all()
        now = self._clock()
        for key, value in rows:
            if datetime.fromisoformat(value.partition(" ")[0]) <= now:
                self._connection.execute(delete(settings).where(settings.c.key == key))

    def _key(self, session_hash: str) -> str:
        return self._PREFIX + session_hash[:48]  # 192 bits: the column is 64 characters wide
