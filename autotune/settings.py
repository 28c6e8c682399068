"""What the operator decides: read once from options and ``AUTOTUNE_...`` variables, then passed as one frozen value.

=========================== ========================================================================================
variable                    meaning
=========================== ========================================================================================
AUTOTUNE_HOST, _PORT        where the web process listens (127.0.0.1:8420; port 0: any free one)
AUTOTUNE_DATA_DIR           everything that is kept (``$XDG_DATA_HOME/autotune``, else ``~/.local/share/autotune``)
AUTOTUNE_DATABASE           URL of a PostgreSQL or SQLite database (an SQLite file in the data directory)
AUTOTUNE_TOKEN              the API token, instead of one made at the first start
AUTOTUNE_ALLOWED_TASKS      comma-separated module prefixes that ``python`` models may come from (none)
AUTOTUNE_ALLOWED_HOSTS      comma-separated further values of the Host header that are answered; ``*``: any
AUTOTUNE_MAX_BODY_BYTES     largest request body (1 MiB)
AUTOTUNE_DEVICE             kind of devices that the scheduler offers: auto (accelerators, else cores), cpu, cuda
AUTOTUNE_SERVER             the service that client commands talk to (http://127.0.0.1:8420)
=========================== ========================================================================================
"""

import difflib
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from autotune.domain.errors import FieldError, InvalidRequestError
from engine.spec import is_allowed_entry_point

DEFAULT_PORT = 8420
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_PREFIX = "AUTOTUNE_"
WILDCARD_HOSTS = ("0.0.0.0", "::", "")


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/autotune``, else ``~/.local/share/autotune``."""
    base = os.environ.get("XDG_DATA_HOME", "")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "share"
    return root / "autotune"


class Settings(BaseSettings):
    """The operator's choices, complete. Arguments win over variables.

    Raises:
        pydantic.ValidationError: a value out of range. `load_settings` turns that into one line per option.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True, frozen=True, extra="ignore")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="port to listen on; 0: any free one")
    data_dir: Path = Field(default_factory=default_data_dir, description="everything that is kept lies here")
    database: SecretStr | None = Field(None, description="database URL; an SQLite file in data_dir when not given")
    token: SecretStr | None = Field(None, description="the API token; made at the first start when not given")
    allowed_tasks: Annotated[tuple[str, ...], NoDecode] = ()
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    max_body_bytes: int = Field(1 << 20, ge=1024)
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="kind of devices that the scheduler offers")
    server: str = Field(f"http://127.0.0.1:{DEFAULT_PORT}", description="the service that client commands talk to")

    @field_validator("allowed_tasks", "allowed_hosts", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("token")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value is not None else ""
        if not text.isascii() or not text.isprintable() or text != text.strip():
            raise ValueError("give printable ASCII characters, without spaces around them: it is sent in a header")
        return value

    @field_validator("server")
    @classmethod
    def _is_http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"give a URL such as http://127.0.0.1:{DEFAULT_PORT}, not {value!r}")
        return value.rstrip("/")

    @property
    def database_url(self) -> str:
        """The database's URL, password included: never log it."""
        if self.database is not None:
            return self.database.get_secret_value()
        return f"sqlite:///{self.data_dir / 'autotune.sqlite3'}"

    @property
    def base_url(self) -> str:
        """Where a browser on this machine reaches the web process."""
        host = "127.0.0.1" if self.host in WILDCARD_HOSTS else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def answers_host(self, host: str) -> bool:
        """Whether a request with this Host header's name (no port, no brackets) is ours.

        A browser tricked by DNS rebinding sends the attacker's *name*; so names are listed, while on a wildcard
        address any literal IP address is accepted, as no name can stand behind it.
        """
        host = host.lower().rstrip(".")
        if host in LOOPBACK_HOSTS or host == self.host.lower():
            return True
        listed = {entry.lower().strip("[]") for entry in self.allowed_hosts}
        if "*" in listed or host in listed:
            return True
        return self.host in WILDCARD_HOSTS and _is_ip_address(host)

    def allows_task(self, entry_point: str) -> bool:
        """Whether ``package.module:make_task`` lies under an allowed prefix, compared by whole module names."""
        return is_allowed_entry_point(entry_point, self.allowed_tasks)


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def load_settings(**options: Any) -> Settings:
    """Settings from variables, overridden by the options that are not None.

    Raises:
        InvalidRequestError: a value that cannot be used; names the variable.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _refuse_misspelt_variables()
    try:
        return Settings(**given)
    except ValidationError as error:
        raise InvalidRequestError(*(
            FieldError(f"{_PREFIX}{str(entry['loc'][0]).upper()}", entry["msg"].removeprefix("Value error, "))
            for entry in error.errors(include_url=False, include_input=False))) from None


def _refuse_misspelt_variables() -> None:
    """A variable that nearly is a setting's was meant to be one; others with our prefix may be other programs' own.

    Raises:
        InvalidRequestError: names the variable, and the setting's.
    """
    known = [name.upper() for name in Settings.model_fields]
    given = {variable: variable.upper().removeprefix(_PREFIX) for variable in os.environ
             if variable.upper().startswith(_PREFIX)}
    meant = {variable: difflib.get_close_matches(name, known, n=1, cutoff=0.7) for variable, name in given.items()
             if name not in known}
    if any(meant.values()):
        raise InvalidRequestError(*(FieldError(variable, f"no such setting; did you mean {_PREFIX}{close[0]}?")
                                    for variable, close in meant.items() if close))
