"""Ingest over gRPC, as JSON; the same as `kvdir bench ingest --output json`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvdir.cli.main import main

if __name__ == "__main__":
    main(["bench", "ingest", "--output", "json"])
