"""`python -m peer_agent`."""

from peer_agent.cli.main import main

main()
