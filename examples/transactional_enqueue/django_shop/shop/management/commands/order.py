from django.core.management.base import BaseCommand
from django.db import transaction

from shop.models import Order
from shop.tasks import confirm


def place_order(item: str, *, is_paid: bool) -> None:
    with transaction.atomic():
        order = Order.objects.create(item=item)
        confirm.enqueue(using="default", args=(order.pk,))
        if not is_paid:
            raise ValueError(f"{item}: not paid")


class Command(BaseCommand):
    help = "Place two orders: one is paid, and one is rolled back."

    def handle(self, *_: object, **__: object) -> None:
        place_order("a lamp", is_paid=True)
        try:
            place_order("a boat", is_paid=False)
        except ValueError as error:
            self.stdout.write(str(error))  # no order, and no job
