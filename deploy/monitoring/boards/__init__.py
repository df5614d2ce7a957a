"""The five dashboards, a file each. What a panel shows belongs here; how Grafana wants it, to grafana.py."""

from deploy.monitoring.boards.capacity import CAPACITY
from deploy.monitoring.boards.fleet import FLEET
from deploy.monitoring.boards.node import NODE
from deploy.monitoring.boards.transfers import TRANSFERS
from deploy.monitoring.boards.trust import TRUST

BOARDS = (FLEET, TRUST, TRANSFERS, NODE, CAPACITY)
