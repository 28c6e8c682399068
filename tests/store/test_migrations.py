"""The schema: from nothing to the newest version, by any number of processes at once."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, text

from autotune.domain.errors import StoreUnavailableError
from autotune.store import Database
from autotune.store.migrations import _config, head_revision
from autotune.store.tables import metadata

PROCESSES, ROUNDS = 6, 4


def plain_connections(url: str) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


def test_an_empty_database_becomes_what_the_tables_say(empty_url: str) -> None:
    database = Database(empty_url)
    database.upgrade()
    database.check()
    database.close()
    connections = plain_connections(empty_url)
    with connections.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == head_revision()
    connections.dispose()


def test_every_migration_can_be_undone(empty_url: str) -> None:
    connections = plain_connections(empty_url)
    database = Database(empty_url)
    database.upgrade()
    database.close()
    with connections.begin() as connection:
        config = _config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert inspect(connections).get_table_names() == ["alembic_version"]
    connections.dispose()


def test_upgrading_again_changes_nothing(empty_url: str) -> None:
    database = Database(empty_url)
    database.upgrade()
    with database.begin() as tx:
        tx.settings.put("key", "value")
    database.upgrade()
    with database.read() as tx:
        assert tx.settings.get("key") == "value"
    database.close()


def test_check_refuses_a_database_without_tables(empty_url: str) -> None:
    database = Database(empty_url)
    with pytest.raises(StoreUnavailableError, match="autotune db upgrade"):
        database.check()
    database.close()


def test_a_database_of_a_newer_release_is_refused(empty_url: str) -> None:
    database = Database(empty_url)
    database.upgrade()
    connections = plain_connections(empty_url)
    with connections.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    connections.dispose()
    with pytest.raises(StoreUnavailableError, match="newer release"):
        database.upgrade()
    with pytest.raises(StoreUnavailableError, match="9999"):
        database.check()
    database.close()


def _start_up(url: str, barrier: Barrier, results: "multiprocessing.Queue[str]") -> None:
    try:
        database = Database(url)
        barrier.wait(timeout=60)
        database.upgrade()
        database.check()
        with database.begin() as tx:
            tx.settings.put(multiprocessing.current_process().name, "started")
        database.close()
    except Exception as error:  # noqa: BLE001 - reported to the test
        results.put(repr(error))
    else:
        results.put("ok")


def test_many_processes_start_on_an_empty_database(new_url: Callable[[], str]) -> None:
    spawn = multiprocessing.get_context("spawn")
    for _ in range(ROUNDS):
        url = new_url()
        barrier, results = spawn.Barrier(PROCESSES), spawn.Queue()
        processes = [spawn.Process(target=_start_up, args=(url, barrier, results)) for _ in range(PROCESSES)]
        for process in processes:
            process.start()
        assert [results.get(timeout=120) for _ in processes] == ["ok"] * PROCESSES
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0
        results.close()
        results.join_thread()
