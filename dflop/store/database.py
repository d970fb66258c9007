"""A database file: made in one go beside its final path, then only read, by any number of processes.

In DuckDB, a process that has a file open for writing keeps all others from reading it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from dflop.base import UserError, own_version, written_whole

# DuckDB is imported where a file is opened: processes that only want the schemas, such as training's ranks,
# start sooner without it (and torch's threads keep it from unloading cleanly, which it complains about).
if TYPE_CHECKING:
    import duckdb

__all__ = ["SCHEMA_VERSION", "read_meta", "read_table", "read_tables", "write_database"]

# Raise this with every change of a table's columns or of their meaning: older files are then refused, not misread.
SCHEMA_VERSION = 9


def read_table(path: Path, table: str, *, made_by: str) -> pl.DataFrame:
    """One whole table or view.

    Raises:
        UserError: when the file is missing, damaged, or was written with another schema version; `made_by` is the
            command that makes it.
    """
    with _opened(path, made_by) as connection:
        return connection.sql(f'SELECT * FROM "{table}"').pl()


def read_tables(path: Path, tables: Sequence[str], *, made_by: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of several small tables by table name, each row a dict from column to value.

    Raises:
        UserError: as `read_table` does.
    """
    found = {}
    with _opened(path, made_by) as connection:
        for table in tables:
            rows = connection.sql(f'SELECT * FROM "{table}"')
            found[table] = [dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()]
    return found


def read_meta(path: Path, *, made_by: str) -> dict[str, str]:
    """The keys and values of the table `meta`.

    Raises:
        UserError: as `read_table` does.
    """
    with _opened(path, made_by) as connection:
        return dict(connection.execute("SELECT key, value FROM meta").fetchall())


@contextmanager
def _opened(path: Path, made_by: str) -> Iterator["duckdb.DuckDBPyConnection"]:
    import duckdb

    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with `dflop {made_by}`")
    try:
        with path.open("rb") as file:
            # For one of SQLite's DuckDB would fetch an extension from the internet.
            if file.read(12)[8:] != b"DUCK":
                raise duckdb.Error("it is no file of DuckDB")
        with duckdb.connect(str(path), read_only=True) as connection:
            # A view of a file from elsewhere could read any file of the user's.
            connection.execute("SET enable_external_access = false")
            found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
            if found != [(str(SCHEMA_VERSION),)]:
                raise UserError(
                    f"{path} has schema version {found[0][0] if found else 'unknown'}, this dflop writes "
                    f"{SCHEMA_VERSION}; remake it with `dflop {made_by}`"
                )
            yield connection
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} is not a dflop database, or it is damaged ({reason}); make it again with `dflop {made_by}`"
        ) from None


def write_database(
    path: Path,
    statements: str,
    frames: Mapping[str, pl.DataFrame],
    meta: Mapping[str, str],
    parameters: Mapping[str, object] | None = None,
) -> None:
    """Write a database at `path` by running `statements`, SQL with a `;` at the end of each statement's last line.

    They refer to `frames` as tables of these names, and to `parameters` as `$name`. The table `meta` holds `meta`, the
    schema version, the dflop version and the time of creation.
    """
    import duckdb

    whole_meta = {
        "schema_version": str(SCHEMA_VERSION),
        "dflop_version": own_version(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **meta,
    }
    with written_whole(path) as beside:
        try:
            with duckdb.connect(str(beside)) as connection:
                for name, frame in frames.items():
                    connection.register(name, frame)
                connection.execute("CREATE TABLE meta (key VARCHAR PRIMARY KEY, value VARCHAR)")
                connection.executemany("INSERT INTO meta VALUES (?, ?)", list(whole_meta.items()))
                for statement in filter(str.strip, statements.split(";\n")):
                    used = {name: value for name, value in (parameters or {}).items() if f"${name}" in statement}
                    connection.execute(statement, used or None)
        except (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException) as error:  # e.g. a full disk
            raise UserError(f"{path} cannot be written: {str(error).splitlines()[0]}") from None
        finally:
            beside.with_name(f"{beside.name}.wal").unlink(missing_ok=True)
