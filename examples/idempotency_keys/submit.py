from tasks import charge

from celery_lease import IdempotencyConflict

first = charge.delay(order_id=7, cents=500)
again = charge.delay(order_id=7, cents=500)
print("the same job" if again.id == first.id else "another job")

try:
    charge.delay(order_id=7, cents=900)
except IdempotencyConflict as error:
    print("refused:", error.key)
