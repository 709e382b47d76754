"""Entry point of `vit` and `python -m vitcli`."""

import signal


def main() -> None:
    """Run the command line. Until it handles Ctrl-C, that ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vitcli.cli import main as command_line

    command_line.main()


if __name__ == "__main__":
    main()
