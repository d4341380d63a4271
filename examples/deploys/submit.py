from tasks import import_rows

print(import_rows.delay().id)
