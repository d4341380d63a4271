from tasks import all_of

result = all_of(1000).delay()
print("parts:", [part.get(timeout=30) for part in result.parent.results])
print("total:", result.get(timeout=30))
