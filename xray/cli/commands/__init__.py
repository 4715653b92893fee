"""One module per command, with the command's name. Other packages add theirs by the entry points `xray.commands`.

Each has `command`, a function with Typer's annotations whose docstring is the help, or a `typer.Typer` with commands of
its own; and `PANEL`, where `xray --help` lists it. A module and its dependencies are imported only when its command is
called: the listing reads help texts from the source.
"""
