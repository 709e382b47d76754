"""`python -m vitcli` is `vit`."""

from vitcli.cli.main import main

main()
