"""Secrets out of what is shown."""

from __future__ import annotations

import traceback
from types import SimpleNamespace

import pytest
from celery import Celery
from sqlalchemy.engine import make_url

from celery_lease import install
from celery_lease.exceptions import SettingError
from celery_lease.masking import mask_url
from celery_lease.store.callers import ConnectionCaller
from celery_lease.store.engine import Store

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("postgresql+psycopg://u:hunter2@host:5432/db", "postgresql+psycopg://u:***@host:5432/db"),
        ("postgresql://:hunter2@host/db", "postgresql://:***@host/db"),
        ("postgresql://u@host/db", "postgresql://u@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("mysql://h/db?user=u&password=hunter2&x=1", "mysql://h/db?user=u&password=***&x=1"),
        ("mysql://h/db?x=1;SSLPassword=hunter2", "mysql://h/db?x=1;SSLPassword=***"),
        ("sqlite:///celery-lease.sqlite3", "sqlite:///celery-lease.sqlite3"),
        ("sqlite:////srv/app@prod/x.db", "sqlite:////srv/app@prod/x.db"),
        ("celery-lease.sqlite3", "celery-lease.sqlite3"),
    ],
)
def test_a_masked_url_keeps_all_but_the_password(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:x@hunter2@host/db",
        "postgresql://u:x/hunter2@host/db",
        "postgresql://u:x?hunter2@host/db",
        "postgresql://u:x\nhunter2@host/db",
        "postgresql:/u:hunter2@host/db",
        "u:hunter2@host/db",
        "host=h user=u password='hunter2'",
    ],
)
def test_a_password_in_a_wrong_url_is_masked_too(url: str) -> None:
    assert SECRET not in mask_url(url)


@pytest.mark.parametrize(
    "name", ["password", "sslpassword", "PASSWD", "my_secret", "access_token", "api_key", "ssl_key"]
)
def test_a_secret_in_the_query_of_the_stores_url_is_shown_nowhere(name: str) -> None:
    store = Store(url=f"postgresql://u:{SECRET}@host/db?application_name=x&{name}={SECRET}")

    for shown in (store.masked_url, repr(store)):
        assert SECRET not in shown
        assert "application_name=x" in shown
        assert "host/db" in shown


def test_a_callers_database_is_described_without_its_secrets() -> None:
    url = make_url(f"postgresql://u:{SECRET}@h/db?password={SECRET}&target_session_attrs=any")
    engine = SimpleNamespace(url=url)
    caller = ConnectionCaller(SimpleNamespace(engine=engine))  # type: ignore[arg-type]

    assert SECRET not in caller.description
    assert "target_session_attrs=any" in caller.description


@pytest.mark.parametrize(
    "password", ["S3@hunter2", "S3@hun:ter2", "S3@hun/hunter2", "S3@h?hunter2", "a@b@hunter2"]
)
def test_a_password_that_must_be_escaped_is_refused_without_a_part_of_it(password: str) -> None:
    with pytest.raises(SettingError, match="%40") as caught:
        Store(url=f"postgresql://u:{password}@127.0.0.1:1/db")

    said = "".join(traceback.format_exception(caught.value))
    assert "lease_store_url" in said
    assert not any(part in said.rpartition("SettingError")[2] for part in ("hun", "ter2", "S3"))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunt%40er@host/db",
        "postgresql://host/db?user=me@here",
        "postgresql://u@host/d",
        "sqlite:////srv/a@b@c/x.db",
    ],
)
def test_an_at_sign_where_it_may_be_is_no_problem(url: str) -> None:
    Store(url=url)


@pytest.mark.parametrize("name", ["store_url", "broker_url", "lease_store_ulr"])
def test_install_shows_no_value_of_a_wrong_setting(name: str) -> None:
    app = Celery(set_as_current=False)

    with pytest.raises(SettingError, match=name) as caught:
        install(app, **{name: f"postgresql://u:{SECRET}@h/db"})

    assert SECRET not in str(caught.value)
