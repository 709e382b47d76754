"""Run `vit` as `python -m vitcli`."""

from vitcli.cli.main import main

main()
