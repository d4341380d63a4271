"""RabbitMQ, from Debian's package."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kombu import Connection

from tests.support import processes
from tests.support.ports import free_port, is_open
from tests.support.servers.server import Server, ServerDied
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from typing_extensions import Self


class RabbitMQ(Server):
    """A RabbitMQ node; first start 7 s, later ones 4 s, 120 MB. User and password ``guest``.

    Erlang's name server (epmd), which a node starts when there is none and leaves behind, is
    started by us beforehand, so that it is a child that can be ended.

    Args:
        consumer_timeout: seconds after which a delivery that nobody acknowledged closes its channel
            (looked at every second).
    """

    label: ClassVar[str] = "RabbitMQ"
    packages: ClassVar[tuple[str, ...]] = ("rabbitmq-server",)
    start_seconds: ClassVar[float] = 60.0

    def __init__(self, *, consumer_timeout: float = 1800.0) -> None:
        super().__init__()
        self._consumer_timeout = consumer_timeout
        self._name_server: subprocess.Popen[bytes] | None = None
        self._distribution_port = 0
        self._name_server_port = 0
        self._vhosts = itertools.count(1)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why there is none: its package is not installed."""
        for program in (_SCRIPT, *(Path("/usr/bin") / name for name in ("epmd", "erl_call"))):
            if not program.exists():
                return f"RabbitMQ: no {program} (Debian: {cls.packages[0]})"
        return None

    @property
    def url(self) -> str:
        """The URL of the virtual host ``/``."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def new_vhost(self) -> str:
        """Make a virtual host, empty and nobody else's, and return its URL. Takes 0.1 s."""
        name = f"t{next(self._vhosts)}"
        self._call(f'rabbit_vhost:add(<<"{name}">>, <<"guest">>)')
        self._call(
            "rabbit_auth_backend_internal:set_permissions("
            f'<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"guest">>)'
        )
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def remove_vhost(self, url: str) -> None:
        """Remove a virtual host by its URL, with its queues and connections."""
        name = url.rpartition("/")[2]
        self._call(f'rabbit_vhost:delete(<<"{name}">>, <<"guest">>)')

    def prepare(self) -> None:
        """Write what does not name a port."""
        # The tick is what looks for deliveries past the consumer timeout.
        self.write("advanced.config", "[{rabbit,[{channel_tick_interval,1000}]}].\n")
        self.write("enabled_plugins", "[].\n")

    def configure(self) -> None:
        """Write the settings."""
        self.write(
            "rabbitmq.conf",
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"consumer_timeout = {round(self._consumer_timeout * 1000)}\n"
            "heartbeat = 10\n"
            "log.file = false\n"
            "log.console = true\n"
            "log.console.level = warning\n"
            "vm_memory_high_watermark.absolute = 1GB\n"
            "disk_free_limit.absolute = 50MB\n",
        )

    def choose_ports(self) -> None:
        """Three: for clients, for other nodes, for the name server."""
        super().choose_ports()
        self._distribution_port = free_port()
        self._name_server_port = free_port()

    def command(self) -> list[str]:
        """Run the script behind the command on PATH, which refuses all users but two."""
        return [str(_SCRIPT)]

    def environment(self) -> dict[str, str]:
        """Everything in the server's folder, nothing read from /etc/rabbitmq."""
        folder = self.folder
        return {
            **super().environment(),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._name_server_port),
            "PATH": f"{_SCRIPT.parent}:{os.environ.get('PATH', os.defpath)}",
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # The script then becomes the Erlang machine instead of waiting for it: one process.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def ask(self) -> None:
        """Log in."""
        with Connection(self.url, connect_timeout=2) as connection:
            connection.connect()

    def _run(self) -> Self:
        if self._name_server is None or self._name_server.poll() is not None:
            self._name_server = processes.spawn(
                ["epmd", "-port", str(self._name_server_port), "-address", "127.0.0.1"],
                folder=self.folder,
                log=self.folder / "log",
                env=self.environment(),
                as_nobody=self.as_nobody,
            )
            eventually(lambda: is_open(self._name_server_port), what="epmd listens")
        return super()._run()

    def stop(self) -> None:
        """End the node, then its name server."""
        super().stop()
        if self._name_server is not None:
            processes.end(self._name_server, number=signal.SIGTERM, timeout=5)

    @property
    def _node(self) -> str:
        return f"t{self.port}@localhost"

    def _call(self, expression: str) -> str:
        """Evaluate an Erlang expression in the node; rabbitmqctl takes 2 s for the same."""
        cookie = (self.folder / ".erlang.cookie").read_text().strip()
        answer = subprocess.run(
            ["/usr/bin/erl_call", "-sname", self._node, "-c", cookie, "-e"],
            input=f"{expression}.\n",
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if answer.returncode != 0 or "{ok, " not in answer.stdout:
            message = f"{expression}: {answer.stdout}{answer.stderr}"
            raise ServerDied(message)
        return answer.stdout


def _script() -> Path:
    return Path("/usr/lib/rabbitmq/bin/rabbitmq-server").resolve()


_SCRIPT = _script()
