"""All rules, a file for each kind of trouble. How they are written is rules.py's business."""

from deploy.monitoring.alerts.capacity import CAPACITY
from deploy.monitoring.alerts.directory import DIRECTORY
from deploy.monitoring.alerts.processes import PROCESSES
from deploy.monitoring.alerts.recorded import RECORDED
from deploy.monitoring.alerts.security import SECURITY
from deploy.monitoring.alerts.store import STORE
from deploy.monitoring.alerts.transfers import TRANSFERS

GROUPS = (RECORDED, PROCESSES, DIRECTORY, STORE, TRANSFERS, CAPACITY, SECURITY)
