"""For tests of the chart (`make test-helm`): they need Helm's own library, which is in an environment of its own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("helm_python") else ["test_*.py"]
