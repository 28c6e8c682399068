"""The command line. One file per group of commands; what a command needs is imported when it runs.

Exit codes: 0 success; 1 it failed, the service refused it, or the study did not succeed; 2 the command line or the file
is wrong; 130 interrupted.
"""

import sys

import typer

from autotune.cli import importing, operate, plan, serve, studies, tune

app = typer.Typer(
    name="autotune", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
    help="Finds the fastest configuration for training a PyTorch model on given hardware.",
    epilog="Every option is also a variable: AUTOTUNE_PORT, AUTOTUNE_DATA_DIR, AUTOTUNE_DATABASE, AUTOTUNE_TOKEN, ...")
serve.register(app)
studies.register(app)
tune.register(app)
plan.register(app)
importing.register(app)
operate.register(app)


def main() -> None:
    """Run the command line; domain errors become one line on stderr."""
    from autotune.domain.errors import AutotuneError, InvalidRequestError

    try:
        app()
    except InvalidRequestError as error:
        for field, message in error.errors:
            typer.echo(f"error: {field}: {message}" if field else f"error: {message}", err=True)
        sys.exit(2)
    except AutotuneError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
