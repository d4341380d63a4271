"""Private servers on 127.0.0.1, one class each; ``server.py`` says what they have in common."""

from tests.support.servers.mariadb import MariaDB
from tests.support.servers.pgbouncer import PgBouncer
from tests.support.servers.postgresql import PostgreSQL
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.servers.server import External, Server
from tests.support.servers.valkey import Valkey

__all__ = ["External", "MariaDB", "PgBouncer", "PostgreSQL", "RabbitMQ", "Server", "Valkey"]
