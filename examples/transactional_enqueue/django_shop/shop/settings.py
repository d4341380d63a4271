from pathlib import Path

BASE_DIR = Path(__file__).parents[1]
SECRET_KEY = "an example"
INSTALLED_APPS = ["shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "shop.sqlite3"},
}

CELERY_LEASE_STORE_URL = f"sqlite:///{DATABASES['default']['NAME']}"  # the same database

# A broker that needs no server; with one of your own, name it here and leave the rest out.
CELERY_BROKER_URL = "filesystem://"
QUEUE = BASE_DIR / "queue"
QUEUE.mkdir(exist_ok=True)
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "data_folder_in": str(QUEUE),
    "data_folder_out": str(QUEUE),
    "control_folder": str(QUEUE),
    "polling_interval": 0.1,
}
