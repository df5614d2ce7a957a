"""The feed of a coordinator and a replica behind it, as JSON; the same as `kvdir bench feed --output json`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvdir.cli.main import main

if __name__ == "__main__":
    main(["bench", "feed", "--output", "json"])
