from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from tasks import DATABASE, confirm


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


engine = create_engine(DATABASE)
Base.metadata.create_all(engine)


def place_order(item: str, *, is_paid: bool) -> None:
    with Session(engine) as session, session.begin():
        order = Order(item=item)
        session.add(order)
        session.flush()  # gives it its number
        confirm.enqueue(session, (order.id,))
        if not is_paid:
            raise ValueError(f"{item}: not paid")


place_order("a lamp", is_paid=True)
try:
    place_order("a boat", is_paid=False)
except ValueError as error:
    print(error)  # no order, and no job
