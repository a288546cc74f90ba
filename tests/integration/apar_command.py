"""The `apar` command as a module, for launchers that start one on each process."""

from cluster.cli.main import app

if __name__ == "__main__":
    app()
