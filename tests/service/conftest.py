"""The REST service over a real SQLite store, asked through HTTP in the same process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from autotune.service.app import create_app
from autotune.settings import Settings
from autotune.store import Database
from tests.support.samples import sample_request

TOKEN = "a-token-for-tests-0123456789"
BASE_URL = "http://127.0.0.1:8420"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/autotune.sqlite3")
    made.upgrade()
    yield made
    made.close()


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    def make(**changes: Any) -> Settings:
        return Settings(**{"data_dir": tmp_path, "token": TOKEN, "port": 8420, **changes})

    return make


@pytest.fixture
def app(database: Database, make_settings: Callable[..., Settings]) -> FastAPI:
    made = create_app(database, make_settings())
    made.state.services.auth.ensure_token()
    return made


@pytest.fixture
def anonymous(app: FastAPI) -> Iterator[TestClient]:
    """Without any credentials."""
    with TestClient(app, base_url=BASE_URL, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    """With the token."""
    with TestClient(app, base_url=BASE_URL, headers={"Authorization": f"Bearer {TOKEN}"},
                    raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def body() -> dict[str, Any]:
    """A valid submission."""
    return sample_request().model_dump(mode="json")


@pytest.fixture
def register_host(database: Database) -> Callable[..., None]:
    def register(host: str = "box", *, device_type: str = "cpu", devices: int = 2) -> None:
        with database.begin() as transaction:
            transaction.hosts.register(host, device_type=device_type, device_name="test device", device_count=devices,
                                       device_indices=range(devices), owner="scheduler-1")

    return register
