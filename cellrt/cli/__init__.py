"""The command line: ``cellrt demo``, ``serve``, ``chat``, ``check``, ``tune``, ``bench`` and ``simulate``."""

from __future__ import annotations

from typing import Annotated

import typer

import cellrt
from cellrt.cli import bench
from cellrt.cli.chat import chat
from cellrt.cli.demo import demo
from cellrt.cli.planning import check, simulate, tune
from cellrt.cli.serve import serve

ABOUT = (
    "Serve neural networks whose shape depends on the request (RNNs, trees, decoders), batched cell by cell over all "
    "requests. cellrt serve starts a server; cellrt chat talks with a language model; cellrt check tells beforehand "
    "whether a model can be served. Each option may also come as an environment variable, which its help names."
)
app = typer.Typer(no_args_is_help=True, help=ABOUT)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"cellrt {cellrt.__version__}")
        raise typer.Exit


@app.callback(help=ABOUT)
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            allow_from_autoenv=False,  # CELLRT_VERSION in the environment says which one an image has, mostly
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Take the options that all commands share. ``ABOUT`` is the help."""


for _command in (demo, serve, chat, check, tune, simulate):
    app.command()(_command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command ``cellrt``. Every option may also come from the environment as ``CELLRT_COMMAND_OPTION``."""
    app(auto_envvar_prefix="CELLRT")


if __name__ == "__main__":
    main()
