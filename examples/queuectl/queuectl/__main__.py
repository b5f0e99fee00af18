"""``python -m queuectl``: the command line."""

from queuectl.cli import main

if __name__ == "__main__":
    main(prog_name="queuectl")
