"""``python -m hybserve`` is the ``hybserve`` command."""

from hybserve.cli import main

if __name__ == "__main__":
    main()
