"""``python -m nanguard``."""

from nanguard.cli import main

if __name__ == "__main__":
    main()
