"""One module a command, named like it. Other packages add theirs with an entry point of the group `xray.commands`.

Each has `command`, a function with Typer's annotations whose docstring is the help, or a `typer.Typer` with commands of
its own; and `PANEL`, where `xray --help` lists it. A module is imported when its command is called, and so is all that
it needs: the listing reads the help of the others in their source.
"""
